//! `doctor`: what this machine is, what the models on it would do, and what would make that better.

mod machine;
mod models;
mod page;

use anyhow::Result;
use serde::Serialize;

use self::{
    machine::{Card, Memory, Processor},
    models::Candidate,
};
use crate::{
    args::DoctorArgs,
    load::cpu_backend,
    roofline,
    settings::Settings,
    terminal::{Terminal, say, thousands},
    version,
};

/// All that is found out; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    version: String,
    processor: Processor,
    memory: Memory,
    card: Card,
    models: Vec<Candidate>,
    /// A sentence each.
    advice: Vec<String>,
}

pub(crate) fn run(args: &DoctorArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    terminal.note("measuring what this machine can read and multiply, which takes some seconds");
    let cpu = cpu_backend(settings)?;
    let rates = roofline::measured(&cpu, terminal)?;
    let (card, card_device) = Card::look(settings, terminal)?;
    let device = card_device.unwrap_or(models::Device::cpu(rates));
    let mut report = Report {
        version: format!("carat {}", version::text()),
        processor: Processor::look(&cpu),
        memory: Memory::look(&cpu, rates)?,
        card,
        models: models::candidates(settings, &device),
        advice: Vec::new(),
    };
    report.advice = advice(&report);
    if args.json {
        return say(serde_json::to_string_pretty(&report)?);
    }
    say(page::text(&report).trim_end())
}

/// Advice that would make things better, the most helpful first.
fn advice(report: &Report) -> Vec<String> {
    let mut advice = Vec::new();
    let card = &report.card;
    if let Some(problem) = &card.problem {
        advice.push(problem.clone());
    }
    if card.name.is_none() && card.problem.is_none() {
        advice.push(
            "an NVIDIA card (Ampere or newer) with its driver would compute many times faster than these cores"
                .to_owned(),
        );
    }
    if report.processor.instructions == "scalar" {
        advice.push(
            "this processor has none of the vector instructions that Carat uses, so it computes slowly; x86 processors since 2013 \
             (AVX2) and Arm ones since 2018 (dot products) have them"
                .to_owned(),
        );
    }
    for model in &report.models {
        let name = &model.name;
        if let (Some(context), Some(trained)) = (model.context, model.trained_context)
            && context < trained
        {
            advice.push(format!(
                "{name}: {} of the model's {} tokens of context fit; --kv-type q8_0 or more free memory makes room for more",
                thousands(context as u64),
                thousands(trained as u64)
            ));
        }
        if model.backend == "cpu" && model.bytes > report.memory.free_bytes {
            advice.push(format!(
                "{name}: the file is larger than the free memory, so tokens wait for the disk; a smaller quantization or model \
                 does not"
            ));
        }
    }
    if report.models.len() == 1 {
        advice.push(
            "the demo is the only model here; `carat pull OWNER/REPO:QUANT` fetches another"
                .to_owned(),
        );
    }
    advice
}
