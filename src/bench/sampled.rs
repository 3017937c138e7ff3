//! The sampler beside a run: which devices its drives lie on, and `windows.csv` when it is over. What the reader got comes
//! from the read events of the trace, what devices moved from the kernel.

use crate::clock::Clock;
use crate::drive::blockmap::BlockMap;
use crate::drive::device::BlockDevice;
use crate::drive::spec::DriveSpec;
use crate::ids::DriveId;
use crate::sys::blockstat::CounterFile;
use crate::trace::events::ReadEvent;
use crate::trace::log::{TraceDrive, TraceError};
use crate::trace::monitor::{DEFAULT_INTERVAL_NS, MonitorError, Sampled, Sampler, Source};
use crate::trace::windows::{
    Cutter, DeviceWindow, SamplerFigures, WINDOWS_FILE, WatchedDevice, WindowWriter, WindowsHeader, columns, of_reads,
};
use std::collections::BTreeMap;
use std::path::Path;

/// A sampler and what it samples.
pub struct RunMonitor {
    sampler: Sampler,
    clock: Clock,
    start_ns: u64,
    devices: Vec<WatchedDevice>,
}

/// What was sampled during a run.
pub struct RunWindows {
    sampled: Sampled,
    devices: Vec<WatchedDevice>,
    span_ns: (u64, u64),
}

/// What the evidence is told: devices, ticks, and windows that were written of drives and of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampledCounts {
    /// Devices that were sampled.
    pub devices: u64,
    /// Ticks of the sampler.
    pub ticks: u64,
    /// Windows of drives.
    pub drive_windows: u64,
    /// Windows of devices.
    pub device_windows: u64,
}

impl RunMonitor {
    /// Finds the devices under `mounts` and begins to sample them. Drives without a device are no error: their windows
    /// then hold the reader's counts alone.
    pub fn start(clock: Clock, mounts: &[DriveSpec]) -> Result<Self, MonitorError> {
        let map = BlockMap::system();
        let mut found: BTreeMap<BlockDevice, WatchedDevice> = BTreeMap::new();
        for (index, mount) in (0u8..).zip(mounts) {
            let Ok(mapped) = map.of_path(&mount.path) else { continue };
            let both = [(mapped.devices, false), (mapped.backing, true)];
            for (device, backing) in both.into_iter().flat_map(|(list, b)| list.into_iter().map(move |d| (d, b))) {
                let name = device.name.clone();
                let seen = found.entry(device).or_insert(WatchedDevice { name, drives: Vec::new(), backing });
                // a disk that is a drive itself is no mere backing
                match (seen.backing, backing) {
                    (true, false) => (seen.drives, seen.backing) = (vec![DriveId(index)], false),
                    (false, true) => {}
                    _ => seen.drives.push(DriveId(index)),
                }
            }
        }
        let (mut sources, mut devices) = (Vec::new(), Vec::new());
        for (device, watched) in found {
            let file = CounterFile::device(&device.sysfs);
            let file = file.map_err(|source| MonitorError::Counters { name: device.name.clone(), source })?;
            sources.push(Source { name: device.name, file });
            devices.push(watched);
        }
        let start_ns = clock.now_ns();
        Ok(Self { sampler: Sampler::start(clock, DEFAULT_INTERVAL_NS, sources)?, clock, start_ns, devices })
    }

    /// Ends the sampling.
    pub fn finish(self) -> RunWindows {
        let sampled = self.sampler.finish();
        RunWindows { sampled, devices: self.devices, span_ns: (self.start_ns, self.clock.now_ns()) }
    }
}

impl RunWindows {
    /// What sampling did and cost.
    pub fn figures(&self) -> &SamplerFigures {
        &self.sampled.figures
    }

    /// The counts as long as nothing is written.
    pub fn unwritten(&self) -> SampledCounts {
        let (devices, ticks) = (self.devices.len() as u64, self.figures().ticks);
        SampledCounts { devices, ticks, drive_windows: 0, device_windows: 0 }
    }

    /// Writes `windows.csv` into `folder`: the windows of each drive from `reads`, then those of each device in the order
    /// of time. Gives what a trace's header says about it, and the counts for the evidence.
    pub fn write(
        &self,
        folder: &Path,
        drives: &[TraceDrive],
        reads: &[ReadEvent],
    ) -> Result<(WindowsHeader, SampledCounts), TraceError> {
        let interval_ns = self.sampled.figures.interval_ns;
        let mut file = WindowWriter::create(&folder.join(WINDOWS_FILE))?;
        let names: Vec<&str> = drives.iter().map(|d| d.name.as_str()).collect();
        let windows = of_reads(reads, drives.len(), interval_ns, self.span_ns);
        let drive_windows = file.drives(&names, &windows, interval_ns, self.span_ns)?;
        let device_windows = self.write_devices(&mut file)?;
        file.finish()?;
        let sampler = self.sampled.figures.clone();
        let counts = SampledCounts { drive_windows, device_windows, ..self.unwritten() };
        Ok((WindowsHeader { interval_ns, columns: columns(), devices: self.devices.clone(), sampler }, counts))
    }

    fn write_devices(&self, file: &mut WindowWriter) -> Result<u64, TraceError> {
        let (sources, interval_ns) = (&self.sampled.sources, self.sampled.figures.interval_ns);
        let (mut cutters, mut rows) = (Vec::with_capacity(sources.len()), 0);
        for (at, reading) in self.sampled.readings.iter().enumerate() {
            let Some(source) = at.checked_rem(sources.len()).and_then(|index| sources.get(index)) else { break };
            let Some(cutter) = cutters.get_mut(at % sources.len()) else {
                file.begin_device(&source.name, reading.t_ns, source.knows_reads())?;
                cutters.push(Cutter::new(interval_ns, source.unit_bytes(), *reading));
                continue;
            };
            let mut closed: Result<(), TraceError> = Ok(());
            Cutter::push(cutter, *reading, &mut |window: DeviceWindow| {
                if closed.is_ok() {
                    closed = file.device(&source.name, &window, source.knows_reads());
                    rows += 1;
                }
            });
            closed?;
        }
        for (source, cutter) in sources.iter().zip(cutters) {
            if let Some(window) = cutter.finish() {
                file.device(&source.name, &window, source.knows_reads())?;
                rows += 1;
            }
        }
        Ok(rows)
    }
}
