//! Histograms and samples as Prometheus reads them (text format 0.0.4). Knows no metric of this server.

use std::fmt::Write as _;

/// Upper ends of buckets for waits of compute and reads, in nanoseconds: 10 µs to 10 s.
pub const WAIT_BUCKETS_NS: [u64; 13] = [
    10_000,
    30_000,
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
    10_000_000_000,
];
/// The same for whole replies: 10 ms to 30 min.
pub const REPLY_BUCKETS_NS: [u64; 11] = [
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
    10_000_000_000,
    30_000_000_000,
    100_000_000_000,
    300_000_000_000,
    1_800_000_000_000,
];

/// Counts by bucket.
#[derive(Clone, Debug)]
pub struct Buckets {
    ends_ns: &'static [u64],
    /// By bucket, not summed up; the last one has no end.
    counts: Vec<u64>,
    sum_ns: u128,
}

impl Buckets {
    /// Empty buckets that end at `ends_ns`, ascending.
    pub fn new(ends_ns: &'static [u64]) -> Self {
        Self { ends_ns, counts: vec![0; ends_ns.len() + 1], sum_ns: 0 }
    }

    /// Counts a value.
    pub fn add(&mut self, ns: u64) {
        self.add_many(ns, 1);
    }

    /// Counts a value `times` times.
    pub fn add_many(&mut self, ns: u64, times: u64) {
        let bucket = self.ends_ns.partition_point(|end| *end < ns);
        self.counts[bucket] += times;
        self.sum_ns += u128::from(ns) * u128::from(times);
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// A page of metrics under construction.
#[derive(Default)]
pub struct Page(String);

/// A name and its value.
pub type Label<'a> = (&'a str, &'a str);

impl Page {
    /// What follows is `name`, of this type, and means `help`.
    pub fn metric(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One sample.
    pub fn sample(&mut self, name: &str, labels: &[Label<'_>], value: u64) {
        self.begin(name, "", labels);
        let _ = writeln!(self.0, " {value}");
    }

    /// A histogram in seconds.
    pub fn histogram(&mut self, name: &str, labels: &[Label<'_>], buckets: &Buckets) {
        let mut sum = 0;
        let ends = buckets.ends_ns.iter().map(|ns| seconds(*ns)).chain(["+Inf".to_string()]);
        for (end, count) in ends.zip(&buckets.counts) {
            sum += count;
            let labels: Vec<Label<'_>> = labels.iter().copied().chain([("le", end.as_str())]).collect();
            self.begin(name, "_bucket", &labels);
            let _ = writeln!(self.0, " {sum}");
        }
        self.begin(name, "_sum", labels);
        let _ = writeln!(self.0, " {}", buckets.sum_ns as f64 / 1e9);
        self.begin(name, "_count", labels);
        let _ = writeln!(self.0, " {sum}");
    }

    fn begin(&mut self, name: &str, suffix: &str, labels: &[Label<'_>]) {
        let _ = write!(self.0, "{name}{suffix}");
        for (at, (label, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{value}\"", if at == 0 { '{' } else { ',' });
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
    }

    /// The page.
    pub fn finish(self) -> String {
        self.0
    }
}

/// Nanoseconds as seconds, exactly.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_sum_up_and_labels_are_quoted() {
        let mut b = Buckets::new(&[1_000_000, 2_500_000_000]);
        b.add(1_000_000);
        b.add(1_000_001);
        b.add_many(9_000_000_000, 3);
        let mut page = Page::default();
        page.metric("x_seconds", "histogram", "Waits.");
        page.histogram("x_seconds", &[("drive", "a\"b\\")], &b);
        page.sample("y", &[], 7);
        assert_eq!(
            page.finish(),
            "# HELP x_seconds Waits.\n# TYPE x_seconds histogram\n\
             x_seconds_bucket{drive=\"a\\\"b\\\\\",le=\"0.001\"} 1\n\
             x_seconds_bucket{drive=\"a\\\"b\\\\\",le=\"2.5\"} 2\n\
             x_seconds_bucket{drive=\"a\\\"b\\\\\",le=\"+Inf\"} 5\n\
             x_seconds_sum{drive=\"a\\\"b\\\\\"} 27.002000001\n\
             x_seconds_count{drive=\"a\\\"b\\\\\"} 5\ny 7\n"
        );
        assert_eq!(b.count(), 5);
    }
}
