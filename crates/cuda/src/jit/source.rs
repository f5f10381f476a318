//! Kernel text: the files under `kernels/`, joined into one text per kernel.
//!
//! `#line` marks keep file names and line numbers, so the compiler's messages point at the file one edits.

use std::{borrow::Cow, fmt::Write};

use super::grids;

use sha2::{Digest, Sha256};

macro_rules! texts {
    ($($name:literal),* $(,)?) => {
        /// Every file under `kernels/`, by its path there.
        const TEXTS: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../kernels/", $name)))),*];
    };
}

texts![
    "attention/attend.cu",
    "attention/flash_decode.cu",
    "attention/flash_prefill.cu",
    "attention/flash_prefill_multicast.cu",
    "attention/flash_prefill_sm90.cu",
    "attention/keys_from_values.cu",
    "attention/kv_norm_rope_store.cu",
    "attention/move_pages.cu",
    "attention/qkv_norm_rope.cu",
    "attention/rope.cu",
    "attention/store_kv.cu",
    "attention/update_tables.cu",
    "draft/cluster_logits.cu",
    "draft/draft_next.cu",
    "draft/nearest_clusters.cu",
    "elementwise/convert.cu",
    "elementwise/geglu.cu",
    "elementwise/pointwise.cu",
    "elementwise/select_sampled.cu",
    "embed/embed_fragments.cu",
    "embed/embed_rows.cu",
    "embed/feed_samples.cu",
    "embed/ple_inputs.cu",
    "host/host_receive.cu",
    "host/host_send.cu",
    "lib/activation.cuh",
    "lib/attention.cuh",
    "lib/batch.cuh",
    "lib/best.cuh",
    "lib/block_float.cuh",
    "lib/block_iq1.cuh",
    "lib/block_iq2.cuh",
    "lib/block_iq3.cuh",
    "lib/block_iq4.cuh",
    "lib/block_legacy.cuh",
    "lib/block_mxfp4.cuh",
    "lib/block_nvfp4.cuh",
    "lib/block_q2_k.cuh",
    "lib/block_q3_k.cuh",
    "lib/block_q4_k.cuh",
    "lib/block_q5_k.cuh",
    "lib/block_q6_k.cuh",
    "lib/block_ternary.cuh",
    "lib/dot.cuh",
    "lib/format.cuh",
    "lib/fragment.cuh",
    "lib/fragment_f16.cuh",
    "lib/fragment_value.cuh",
    "lib/fragment_wgmma.cuh",
    "lib/gemm_offsets.cuh",
    "lib/gemm_weights.cuh",
    "lib/gemv_float.cuh",
    "lib/gemv_fragment.cuh",
    "lib/gemv_input.cuh",
    "lib/gemv_quartet.cuh",
    "lib/gemv_step.cuh",
    "lib/grid.cuh",
    "lib/host.cuh",
    "lib/kv.cuh",
    "lib/kv_q8_0.cuh",
    "lib/kv_tile.cuh",
    "lib/norm.cuh",
    "lib/num.cuh",
    "lib/prepared_rows.cuh",
    "lib/ptx.cuh",
    "lib/quads.cuh",
    "lib/reduce.cuh",
    "lib/rope.cuh",
    "lib/sample.cuh",
    "lib/scored.cuh",
    "lib/tied_keys.cuh",
    "lib/token_tiles.cuh",
    "linear/gemm.cu",
    "linear/gemm_medium.cu",
    "linear/gemm_medium_sm90.cu",
    "linear/gemm_packed_sm90.cu",
    "linear/gemv.cu",
    "linear/linear_plain.cu",
    "linear/ple_branch.cu",
    "linear/prepare_rows.cu",
    "load/dequantize.cu",
    "load/pack.cu",
    "moe/experts_linear.cu",
    "moe/experts_sum.cu",
    "moe/permute.cu",
    "moe/route.cu",
    "moe/router_scores.cu",
    "norm/fused_norm.cu",
    "norm/rms_norm.cu",
    "roofline/multiply_peak.cu",
    "roofline/read_peak.cu",
    "sample/logprobs.cu",
    "sample/sample.cu",
    "sample/sample_truncate.cu",
];

/// Digest of all kernel text.
pub(crate) fn digest() -> String {
    let mut digest = Sha256::new();
    for (name, text) in TEXTS {
        for part in [name, text] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
    }
    let mut hex = String::new();
    for byte in &digest.finalize()[..12] {
        write!(hex, "{byte:02x}").expect("strings take all writes");
    }
    hex
}

/// The one text that is no file.
const GRID_TABLES: &str = "lib/grid_tables.cuh";

fn text(name: &str) -> Cow<'static, str> {
    if name == GRID_TABLES {
        return Cow::Owned(grids::text());
    }
    let found = TEXTS.iter().find(|(path, _)| *path == name);
    let (_, text) =
        found.unwrap_or_else(|| panic!("kernels/{name} is included, but not listed in source.rs"));
    Cow::Borrowed(text)
}

/// The whole text of kernel `name`, includes joined in, each once.
pub(crate) fn joined(name: &str) -> String {
    let mut out = String::new();
    let file = format!("/{name}.cu");
    let found = TEXTS.iter().find(|(path, _)| path.ends_with(&file));
    let (path, _) = found.unwrap_or_else(|| panic!("no kernel is called {name}"));
    join(path, &mut Vec::new(), &mut out);
    out
}

fn join(file: &str, seen: &mut Vec<String>, out: &mut String) {
    if seen.iter().any(|f| f == file) {
        return;
    }
    seen.push(file.to_owned());
    let mark = |line: usize, out: &mut String| {
        writeln!(out, "#line {line} \"kernels/{file}\"").expect("strings take all writes");
    };
    mark(1, out);
    for (number, line) in text(file).lines().enumerate() {
        let include = line
            .strip_prefix("#include \"")
            .and_then(|rest| rest.strip_suffix('"'));
        if let Some(include) = include {
            join(include, seen, out);
            mark(number + 2, out);
        } else if line.trim() != "#pragma once" {
            out.push_str(line);
            out.push('\n');
        } else {
            out.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_file_is_listed_once_and_in_order() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let mut files = Vec::new();
        for folder in fs::read_dir(root).unwrap() {
            let folder = folder.unwrap().file_name().into_string().unwrap();
            for entry in fs::read_dir(format!("{root}/{folder}")).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                files.push(format!("{folder}/{name}"));
            }
        }
        files.sort();
        let listed: Vec<&str> = TEXTS.iter().map(|(name, _)| *name).collect();
        assert_eq!(listed, files);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let joined = joined("rms_norm");
        let mut at = (String::new(), 0);
        let mut checked = 0;
        for line in joined.lines() {
            if let Some(mark) = line.strip_prefix("#line ") {
                let (number, file) = mark.split_once(' ').unwrap();
                let file = file.trim_matches('"').strip_prefix("kernels/").unwrap();
                at = (file.to_owned(), number.parse().unwrap());
                continue;
            }
            let text = text(&at.0);
            let original = text.lines().nth(at.1 - 1).unwrap();
            assert!(line == original || original == "#pragma once", "{at:?}");
            at.1 += 1;
            checked += 1;
        }
        assert!(checked > 50);
    }

    #[test]
    fn includes_are_joined_once() {
        let joined = joined("kv_norm_rope_store");
        assert_eq!(joined.matches("struct Rows {").count(), 1);
        assert!(!joined.contains("#include"));
    }
}
