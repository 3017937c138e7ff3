//! The instruction sets that kernels are written for, and which of them this processor runs. Knows no arithmetic.

use std::fmt;
use std::str::FromStr;

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelIsa {
    /// Portable Rust, the reference.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW and VL beside AVX2 and FMA.
    Avx512,
    /// aarch64 with NEON.
    Neon,
}

impl KernelIsa {
    /// The fastest one that this processor runs.
    pub fn detect() -> Self {
        let best = [KernelIsa::Avx512, KernelIsa::Avx2, KernelIsa::Neon];
        best.into_iter().find(|isa| isa.is_available()).unwrap_or(KernelIsa::Scalar)
    }

    /// Whether this processor runs it.
    pub fn is_available(self) -> bool {
        match self {
            KernelIsa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            KernelIsa::Avx512 => {
                KernelIsa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            KernelIsa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Every instruction set that kernels are written for.
    pub const ALL: [KernelIsa; 4] = [KernelIsa::Scalar, KernelIsa::Avx2, KernelIsa::Avx512, KernelIsa::Neon];

    /// The name that records carry.
    pub fn name(self) -> &'static str {
        match self {
            KernelIsa::Scalar => "scalar",
            KernelIsa::Avx2 => "avx2",
            KernelIsa::Avx512 => "avx512",
            KernelIsa::Neon => "neon",
        }
    }
}

impl fmt::Display for KernelIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KernelIsa {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let names = || KernelIsa::ALL.map(KernelIsa::name).join(", ");
        let found = KernelIsa::ALL.into_iter().find(|isa| isa.name() == s);
        found.ok_or_else(|| format!("`{s}` is not a kernel instruction set; use one of {}", names()))
    }
}
