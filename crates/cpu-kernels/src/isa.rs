//! Levels of vector instructions: the best is detected once at start and lowered on request.

/// A level of vector instructions. Higher levels compute the same bits faster, but for [`Isa::Amx`] with large batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, compiled for the least processor of the target.
    Scalar,
    /// NEON with the dot products of Arm v8.2.
    Neon,
    /// The same, and the products of two rows with two rows of Arm v8.6.
    I8mm,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same, and the dot products of AVX-VNNI.
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// The same with BF16, VBMI and GFNI, and the tile registers of AMX: large batches have results of their own.
    Amx,
}

impl Isa {
    pub const ALL: [Isa; 7] = [
        Isa::Scalar,
        Isa::Neon,
        Isa::I8mm,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Vnni,
        Isa::Amx,
    ];

    /// The best this processor can do.
    pub fn detect() -> Isa {
        Isa::ALL
            .into_iter()
            .filter(|isa| isa.available())
            .max()
            .unwrap_or(Isa::Scalar)
    }

    /// Whether this level has tile registers.
    pub fn has_tiles(self) -> bool {
        self == Isa::Amx
    }

    /// Whether this processor, and the system, let it be used.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Neon => has_neon_dotprod(),
            Isa::I8mm => has_i8mm(),
            Isa::Avx2 => has_avx2(),
            Isa::AvxVnni => has_avx_vnni(),
            Isa::Avx512Vnni => has_avx512_vnni(),
            Isa::Amx => has_amx(),
        }
    }
}

#[cfg(target_arch = "aarch64")]
fn has_neon_dotprod() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
        && std::arch::is_aarch64_feature_detected!("dotprod")
}

#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    has_neon_dotprod() && std::arch::is_aarch64_feature_detected!("i8mm")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_neon_dotprod() -> bool {
    false
}

#[cfg(not(target_arch = "aarch64"))]
fn has_i8mm() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx_vnni() -> bool {
    has_avx2() && is_x86_feature_detected!("avxvnni")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512_vnni() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    has_avx512_vnni()
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("gfni")
        && crate::simd::amx::permitted()
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_amx() -> bool {
    false
}
