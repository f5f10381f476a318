//! What is given up where memory is short, cheapest first, and why: lines for a person say so.
//!
//! 1. Tables that are only looked up go to host memory: a few kilobytes per token cross the bus.
//! 2. Layers lose the f16 copies of their weights that cuBLASLt multiplies, the last layers first: their prompts go through the
//!    native GEMM, which reads packed weights.
//! 3. All layers do.
//!
//! Each step is tried with those before it in force. Keys and values stay as they were asked for: their type is the caller's.

use carat_model::{
    backend::{BackendError, CompileOptions},
    kv::{KvType, PerGroup},
    layout::page_bytes,
    plan::Plan,
    weights::Weights,
};

use super::{
    lower::weights_from_layer,
    prepare::{Prepared, prepare},
    target::{GemmImpl, Target},
};
use crate::config::TableMemory;

/// The first choice that fits into so many bytes. The last one is returned whether it does or not.
pub(crate) fn fitting(
    plan: &Plan,
    weights: &Weights,
    options: &CompileOptions,
    (target, tables): (Target, TableMemory),
    free_bytes: u64,
) -> Result<Prepared, BackendError> {
    let compile = |target: Target, tables| prepare(plan, weights, options, tables, target);
    let over = |prepared: &Prepared| prepared.memory.device_bytes().saturating_sub(free_bytes);
    let mut prepared = compile(target, tables)?;
    let missing = over(&prepared);
    if missing == 0 {
        return Ok(prepared);
    }
    let mut given_up = Vec::new();
    let all_copies = prepared.memory.expanded_weights;
    if tables == TableMemory::Device {
        prepared = compile(target, TableMemory::Host)?;
        if prepared.memory.host_tables > 0 {
            given_up.push(format!(
                "tables are looked up in host memory: {}, a few kilobytes per token over the bus",
                size(prepared.memory.host_tables)
            ));
        }
    }
    if target.gemm == GemmImpl::CublasLt {
        let layers = layer_count(plan);
        let mut first = layers;
        while first > 0 && over(&prepared) > 0 {
            let copies = |first| {
                let behind = weights_from_layer(plan, first).collect();
                prepared.weights.copies_of(&behind) as u64
            };
            first = (0..first)
                .rev()
                .find(|first| copies(*first) >= over(&prepared))
                .unwrap_or(0);
            let fewer = match first {
                0 => Target {
                    gemm: GemmImpl::Native,
                    ..target
                },
                _ => Target {
                    first_uncopied_layer: Some(first),
                    ..target
                },
            };
            prepared = compile(fewer, TableMemory::Host)?;
        }
        let gone = size(all_copies.saturating_sub(prepared.memory.expanded_weights));
        if first == 0 {
            given_up.push(format!(
                "no layer has f16 copies of its weights ({gone}): prompts are read two to three times slower"
            ));
        } else if first < layers {
            given_up.push(format!(
                "layers {first} to {} have no f16 copies of their weights ({gone}): prompts are read slower there",
                layers - 1
            ));
        }
    }
    given_up.push(format!(
        "with {} more of device memory nothing would be given up{}",
        size(missing as usize),
        smaller_kv(plan, options)
    ));
    prepared.memory.given_up = given_up;
    Ok(prepared)
}

fn layer_count(plan: &Plan) -> usize {
    let layers = plan.steps.iter().filter_map(|s| plan.origin(s).layer);
    layers.max().map_or(0, |last| last + 1)
}

/// The bytes that keys and values in Q8_0 would save, as the end of a sentence; nothing where they are.
fn smaller_kv(plan: &Plan, options: &CompileOptions) -> String {
    let bytes = |kv: PerGroup<KvType>| {
        let page = page_bytes(plan, kv);
        page.full * options.pages.full + page.sliding * options.pages.sliding
    };
    match bytes(options.kv).saturating_sub(bytes(KvType::Q8_0.into())) {
        0 => String::new(),
        saved => format!("; --kv-type q8_0 would free {}", size(saved)),
    }
}

fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        ..1024.0 => format!("{mib:.1} MiB"),
        _ => format!("{:.2} GiB", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::{backend::Batching, gemma4};
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::config::Fusion;

    const ROWS: usize = 64;

    fn options() -> CompileOptions {
        CompileOptions {
            pages: PerGroup {
                full: 8,
                sliding: 8,
            },
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: ROWS,
            max_sampled: 8,
            probe: false,
            batching: Batching::Fast,
        }
    }

    fn cublaslt() -> Target {
        Target {
            gemm: GemmImpl::CublasLt,
            ..Target::hopper(Fusion::On, ROWS)
        }
    }

    /// The model compiled for so many bytes less than it would like.
    fn less(variant: Variant, missing: u64) -> (Prepared, u64) {
        let model = Tiny::new(variant, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let within = |free_bytes| {
            let choice = (cublaslt(), TableMemory::Device);
            fitting(&plan, &model.weights, &options(), choice, free_bytes).unwrap()
        };
        let all = within(u64::MAX).memory.device_bytes();
        let free_bytes = all - missing;
        (within(free_bytes), free_bytes)
    }

    #[test]
    fn nothing_is_given_up_where_all_fits() {
        let (prepared, _) = less(Variant::E4b, 0);
        assert_eq!(prepared.target.gemm, GemmImpl::CublasLt);
        assert_eq!(prepared.memory.host_tables, 0);
        assert!(prepared.memory.given_up.is_empty());
    }

    #[test]
    fn tables_leave_the_card_before_any_copy_does() {
        let (all, _) = less(Variant::E4b, 0);
        let (prepared, free_bytes) = less(Variant::E4b, 1);
        assert!(prepared.memory.device_bytes() <= free_bytes);
        assert!(prepared.memory.host_tables > 0);
        assert_eq!(
            prepared.memory.expanded_weights,
            all.memory.expanded_weights
        );
        let lines = &prepared.memory.given_up;
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("host memory"), "{lines:?}");
        assert!(lines[1].contains("--kv-type q8_0"), "{lines:?}");
    }

    #[test]
    fn the_last_layers_lose_their_copies_first_and_the_first_keep_theirs() {
        let (all, _) = less(Variant::Dense12b, 0);
        let copies = all.memory.expanded_weights as u64;
        let tables = less(Variant::Dense12b, 1).0.memory.host_tables as u64;
        let (prepared, free_bytes) = less(Variant::Dense12b, tables + copies / 4);
        assert!(prepared.memory.device_bytes() <= free_bytes);
        assert_eq!(prepared.target.gemm, GemmImpl::CublasLt);
        let kept = prepared.memory.expanded_weights as u64;
        assert!(0 < kept && kept < copies, "{kept} of {copies}");
        let lines = &prepared.memory.given_up;
        assert!(lines.iter().any(|l| l.starts_with("layers ")), "{lines:?}");
    }

    #[test]
    fn what_does_not_fit_at_all_is_the_smallest_there_is() {
        let model = Tiny::new(Variant::Dense12b, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let choice = (cublaslt(), TableMemory::Device);
        let prepared = fitting(&plan, &model.weights, &options(), choice, 0).unwrap();
        assert_eq!(prepared.target.gemm, GemmImpl::Native);
        let lines = &prepared.memory.given_up;
        assert!(lines.iter().any(|l| l.contains("no layer")), "{lines:?}");
    }
}
