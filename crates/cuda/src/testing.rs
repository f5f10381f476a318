//! One kernel at a time on a card (or the emulator): what tests and timings of kernels share.
//!
//! Such tests are marked ignored, because libtest cannot tell at run time that there is no card; `gpu-check.sh` runs them.

use std::{env, path::PathBuf, sync::Arc, time::Duration};

use carat_gguf::{
    Gguf, QuantType,
    writer::{Writer, write_tensor},
};
use carat_model::weights::Weights;
use cudarc::driver::{CudaGraph, sys};

use crate::{
    config::{CudaConfig, Tier},
    device::{Address, Buffer, Device, Grid, Module, launch},
    jit::compiler::{Architecture, Compiler},
    kernel::Specialization,
};

/// An open card with a compiler.
pub(crate) struct Card {
    pub(crate) device: Arc<Device>,
    compiler: Compiler,
}

/// Numbers that buffers are made of.
pub(crate) trait Plain: Copy {
    const BYTES: usize = size_of::<Self>();
    fn put(self, bytes: &mut [u8]);
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Plain for $type {
            fn put(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn get(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().expect("cut to size"))
            }
        }
    )*};
}
plain!(u8, i8, u16, u32, i32, u64, f32);

impl Card {
    pub(crate) fn open(tier: Tier) -> Card {
        let config = CudaConfig {
            tier,
            cache_dir: Some(env::temp_dir().join("carat-test-kernels")),
            library_dirs: library_dirs(),
            ..CudaConfig::default()
        };
        let device = Device::open(0, None).expect("a card");
        let architecture = Architecture::of(device.capability, tier);
        Card {
            device,
            compiler: Compiler::new(architecture, &config),
        }
    }

    pub(crate) fn load(&self, specialization: &Specialization) -> Module {
        let images = self.compiler.images(&[specialization]).expect("compiles");
        let name = specialization.to_string();
        self.device
            .load(&name, &images[0], specialization.entries)
            .expect("loads")
    }

    /// Compiles side by side what [`Card::load`] will then find in the cache.
    pub(crate) fn compile(&self, specializations: &[Specialization]) {
        let all: Vec<&Specialization> = specializations.iter().collect();
        self.compiler.images(&all).expect("compiles");
    }

    pub(crate) fn upload<T: Plain>(&self, values: &[T]) -> Buffer {
        let bytes = values.len() * T::BYTES;
        let buffer = self.device.allocate("test", bytes).expect("memory");
        let mut host = self.device.allocate_host("test", bytes).expect("memory");
        for (to, value) in host.bytes_mut().chunks_exact_mut(T::BYTES).zip(values) {
            value.put(to);
        }
        self.device
            .copy_in(&host, &buffer, 0, bytes)
            .expect("copies");
        self.device.wait("uploading").expect("copies");
        buffer
    }

    pub(crate) fn download<T: Plain>(&self, buffer: &Buffer, count: usize) -> Vec<T> {
        let bytes = count * T::BYTES;
        let mut host = self.device.allocate_host("test", bytes).expect("memory");
        self.device
            .copy_out(buffer, 0, &mut host, bytes)
            .expect("copies");
        let values = host.bytes()[..bytes].chunks_exact(T::BYTES);
        values.map(T::get).collect()
    }

    /// Launches and waits.
    pub(crate) fn run(&self, module: &Module, grid: Grid, params: &[u8]) {
        self.device.bind().expect("binds");
        launch(module, grid, params).expect("launches");
        self.device.wait("running a kernel").expect("runs");
    }

    /// The launches of a call as a graph. It is run once before that, to load whatever it needs.
    pub(crate) fn captured(&self, mut call: impl FnMut()) -> CudaGraph {
        self.device.bind().expect("binds");
        call();
        self.device.wait("a first call").expect("runs");
        let stream = self.device.captured_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).expect("begins");
        call();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        graph.expect("is captured").expect("is there")
    }

    /// As [`Card::time`], but captured: the host's own time does not count, which is longer than that of short kernels.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn time_captured(&self, count: usize, mut call: impl FnMut(usize)) -> Duration {
        let graph = self.captured(|| (0..count).for_each(&mut call));
        graph.launch().expect("launches");
        let start = self.device.moment().expect("an event");
        graph.launch().expect("launches");
        let end = self.device.moment().expect("an event");
        self.device.wait("timing").expect("runs");
        start.until(&end).expect("times") / count as u32
    }

    /// The time of one call, the mean of `count` after some to warm up. The call gets its number, to rotate what it reads.
    pub(crate) fn time(&self, count: usize, mut call: impl FnMut(usize)) -> Duration {
        self.device.bind().expect("binds");
        (0..count.min(10)).for_each(&mut call);
        let start = self.device.moment().expect("an event");
        (0..count).for_each(&mut call);
        let end = self.device.moment().expect("an event");
        self.device.wait("timing").expect("runs");
        start.until(&end).expect("times") / count as u32
    }
}

/// Says that a machine without a card is to fail.
#[expect(clippy::disallowed_methods, reason = "a setting of the test harness")]
#[allow(dead_code, reason = "called by the timing programs")]
pub(crate) fn is_card_required() -> bool {
    env::var_os("GPU_REQUIRED").is_some_and(|v| v == "1")
}

/// Folders with NVIDIA's libraries that a person named.
#[expect(clippy::disallowed_methods, reason = "a setting of the test harness")]
pub(crate) fn library_dirs() -> Vec<PathBuf> {
    env::var_os("NVRTC_DIR")
        .map(PathBuf::from)
        .into_iter()
        .collect()
}

/// Numbers as the bits of f16.
pub(crate) fn f16_bits(values: &[f32]) -> Vec<u16> {
    let bits = |v: &f32| half::f16::from_f32(*v).to_bits();
    values.iter().map(bits).collect()
}

/// The number that the bits of an f16 stand for.
pub(crate) fn f16_value(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

/// A file's worth of tensors: name, shape, format, bytes.
pub(crate) fn weights_of(tensors: &[(&str, Vec<usize>, QuantType, Vec<u8>)]) -> Weights {
    let mut writer = Writer::default();
    for (name, shape, quant, bytes) in tensors {
        assert_eq!(writer.tensor(name, shape, *quant), bytes.len());
    }
    let mut file = Vec::new();
    writer
        .write_head(&mut file)
        .expect("memory takes all writes");
    for (.., bytes) in tensors {
        write_tensor(&mut file, bytes).expect("memory takes all writes");
    }
    let file = Gguf::from_bytes("test", file).expect("a valid file");
    Weights::of_file(Arc::new(file))
}

/// An address inside a buffer, in elements.
pub(crate) fn at<T: Plain>(buffer: &Buffer, element: usize) -> Address {
    buffer.address().offset(element * T::BYTES)
}

/// Random numbers that repeat: normal values from a seed.
pub(crate) fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 + 0.5) / (1u32 << 24) as f32
    };
    let normal = |_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
    (0..count).map(normal).collect()
}

/// `|a - b| / |b|`, infinite if anything is not a number.
pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut difference, mut size) = (0.0, 0.0);
    for (&a, &b) in found.iter().zip(expected) {
        if !a.is_finite() {
            return f64::INFINITY;
        }
        difference += f64::from(a - b).powi(2);
        size += f64::from(b).powi(2);
    }
    (difference / size).sqrt()
}

mod tests {
    use super::*;

    #[test]
    #[ignore = "needs a card"]
    fn what_goes_up_comes_back() {
        let card = Card::open(Tier::Best);
        let values = normals(1, 1000);
        let buffer = card.upload(&values);
        assert_eq!(card.download::<f32>(&buffer, 1000), values);
        assert!(card.time(3, |_| ()) < Duration::from_secs(1));
        assert_eq!(at::<f32>(&buffer, 2), buffer.address().offset(8));
        assert!(relative_error(&values, &values) == 0.0);
    }
}
