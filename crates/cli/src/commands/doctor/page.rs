//! The report as people read it.

use std::fmt::Write as _;

use super::{
    Report,
    machine::{Card, Memory, Processor},
    models::Candidate,
};
use crate::terminal::{bytes, thousands};

pub(super) fn text(report: &Report) -> String {
    let mut text = format!("{}\n\n", report.version);
    for (name, line) in [
        ("processor", processor(&report.processor)),
        ("caches", report.processor.caches.join(", ")),
        ("memory", memory(&report.memory)),
        ("card", card(&report.card)),
        ("libraries", libraries(&report.card)),
        ("kernels", kernels(&report.card)),
    ] {
        if !line.is_empty() {
            let _ = writeln!(text, "{name:<10} {line}");
        }
    }
    text += "\nmodels\n";
    for model in &report.models {
        let _ = writeln!(text, "  {} ({})", model.name, bytes(model.bytes));
        let _ = writeln!(text, "    {}", prospects(model));
        if let (Some(tuning), None) = (&model.tuning, &model.problem) {
            let _ = writeln!(text, "    choices for this card: {tuning}");
        }
        // Where all of it is on the card there is nothing to tell.
        let placement = model.placement.as_deref().unwrap_or_default();
        for line in placement.lines().filter(|_| model.offloaded_bytes > 0) {
            let _ = writeln!(text, "      {line}");
        }
    }
    if !report.advice.is_empty() {
        text += "\nwhat would help\n";
        for sentence in &report.advice {
            let _ = writeln!(text, "  {sentence}");
        }
    }
    text
}

fn processor(p: &Processor) -> String {
    let name = p.name.as_deref().unwrap_or("unnamed");
    let (threads, level) = (p.threads, &p.instructions);
    format!("{name}, {threads} threads, instructions {level}")
}

fn memory(m: &Memory) -> String {
    format!(
        "{} free of {}{}",
        bytes(m.free_bytes),
        bytes(m.total_bytes),
        rates(m.read_bytes_per_second, m.multiply_adds_per_second)
    )
}

/// Behind what they are rates of.
fn rates(read: Option<f64>, multiply_adds: Option<f64>) -> String {
    match (read, multiply_adds) {
        (Some(read), Some(multiply_adds)) => format!(
            ", reads {:.1} GB/s, multiplies {:.2} T/s",
            read / 1e9,
            multiply_adds / 1e12
        ),
        _ => String::new(),
    }
}

fn card(c: &Card) -> String {
    let Some(name) = &c.name else {
        let text = match c.problem {
            Some(_) => "cannot be used",
            None => "none",
        };
        return text.to_owned();
    };
    let memory = match (c.free_bytes, c.total_bytes) {
        (Some(free), Some(total)) => format!(", {} free of {}", bytes(free), bytes(total)),
        _ => String::new(),
    };
    let architecture = c.architecture.as_deref().unwrap_or("unknown");
    let rates = rates(c.read_bytes_per_second, c.multiply_adds_per_second);
    format!("{name} ({architecture}){memory}{rates}")
}

fn libraries(c: &Card) -> String {
    let Some(driver) = &c.driver_cuda else {
        return String::new();
    };
    let nvrtc = c.nvrtc.as_deref().unwrap_or("not found");
    let cublaslt = match c.cublaslt {
        Some(true) => "used",
        Some(false) | None => "not used",
    };
    format!("driver for CUDA {driver}, NVRTC {nvrtc}, cuBLASLt {cublaslt}")
}

fn kernels(c: &Card) -> String {
    let ahead = c.kernels_ahead.as_ref();
    let ahead = ahead.map(|folder| format!("compiled ahead, in {}", folder.display()));
    let kept = c.kernel_cache.as_ref().filter(|_| c.kernel_cache_bytes > 0);
    let kept = kept.map(|folder| {
        let size = bytes(c.kernel_cache_bytes);
        format!("{size} compiled, in {}", folder.display())
    });
    let both: Vec<String> = ahead.into_iter().chain(kept).collect();
    both.join("; ")
}

fn prospects(model: &Candidate) -> String {
    if let Some(problem) = &model.problem {
        return problem.clone();
    }
    let context = model.context.unwrap_or(0) as u64;
    let speed = match model.tokens_per_second_bound {
        Some(bound) if bound >= 10.0 => {
            format!(", at most {} tokens per second", thousands(bound as u64))
        }
        Some(bound) => format!(", at most {bound:.1} tokens per second"),
        None => String::new(),
    };
    let (backend, context) = (model.backend, thousands(context));
    let offloaded = match model.offloaded_bytes {
        0 => String::new(),
        some => format!(
            ", {} of its weights in host memory, read through the bus",
            bytes(some)
        ),
    };
    format!("on {backend}: {context} tokens of context{speed}{offloaded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_beyond_the_card_says_what_lies_where() {
        let mut model = Candidate {
            name: "large".to_owned(),
            bytes: 20 << 30,
            backend: "cuda",
            context: Some(8192),
            trained_context: Some(131_072),
            offloaded_bytes: 0,
            placement: Some("weights 9 GiB".to_owned()),
            tuning: None,
            tokens_per_second_bound: Some(50.0),
            problem: None,
        };
        assert_eq!(
            prospects(&model),
            "on cuda: 8,192 tokens of context, at most 50 tokens per second"
        );
        model.offloaded_bytes = 3 << 30;
        model.tokens_per_second_bound = None;
        assert_eq!(
            prospects(&model),
            "on cuda: 8,192 tokens of context, 3.00 GiB of its weights in host memory, read through the bus"
        );
    }
}
