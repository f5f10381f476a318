//! Addresses of what a program reads and writes, and the small things that are copied there once.

use std::{collections::HashMap, sync::Arc};

use carat_model::{
    kv::{KvGroup, PerGroup},
    plan::Plan,
};

use crate::{
    compile::memory::Parts,
    device::{Address, Buffer, Device, HostBuffer},
    error::CudaError,
    kernel::{MatrixAt, PagesAt, TiedAt, WeightFormat, WeightOperand},
};

/// Writes words to host memory, from a word on.
pub(super) fn put_words(host: &mut HostBuffer, start: usize, words: &[u32]) {
    let bytes = host.bytes_mut()[start * 4..].chunks_exact_mut(4);
    for (to, word) in bytes.zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
}

pub(super) fn value_addresses(plan: &Plan, parts: &Parts, activations: &Buffer) -> Vec<Address> {
    let mut at = vec![Address::NULL; plan.value_count()];
    let values = plan.steps.iter().filter_map(|s| s.step.out());
    for value in values.filter(|v| parts.stores(*v)) {
        at[value.index()] = activations.address().offset(parts.value(value));
    }
    at
}

pub(super) fn scratch_addresses(parts: &Parts, scratch: &Buffer) -> Vec<Address> {
    let offsets = parts.scratch.offsets.iter();
    offsets.map(|&o| scratch.address().offset(o)).collect()
}

/// Pages of each slot, in the plan's order, and what keys are made with where they follow from values.
pub(super) fn kv_addresses(
    plan: &Plan,
    parts: &Parts,
    kv: &PerGroup<Buffer>,
    (weights, ropes): (&HashMap<WeightOperand, MatrixAt>, &[Address]),
) -> Vec<PagesAt> {
    let place = |group: KvGroup| {
        let start = kv.get(group).address();
        let places = parts.kv.get(group).slots.iter();
        places.map(move |place| PagesAt {
            keys: start.offset(place.keys),
            values: start.offset(place.values),
            chunk_pages: place.chunk_pages,
            chunk_shift: place.chunk_shift,
            tied: TiedAt::NONE,
        })
    };
    let (mut full, mut sliding) = (place(KvGroup::Full), place(KvGroup::Sliding));
    let slots = plan.slots.iter().map(|slot| match slot.group {
        KvGroup::Full => full.next(),
        KvGroup::Sliding => sliding.next(),
    });
    let mut slots: Vec<PagesAt> = slots
        .map(|pages| pages.expect("each slot has its pages"))
        .collect();
    for (slot, keys) in plan.tied_keys() {
        let weight = WeightOperand::one(keys.weight, WeightFormat::Vector);
        slots[slot.0 as usize].tied = TiedAt {
            key_weight: weights[&weight].start,
            key_frequencies: ropes[keys.rope.0 as usize],
        };
    }
    slots
}

pub(super) fn upload_ropes(
    device: &Arc<Device>,
    plan: &Plan,
) -> Result<(Buffer, Vec<Address>), CudaError> {
    let mut words = Vec::new();
    let mut offsets = Vec::new();
    for rope in &plan.ropes {
        offsets.push(words.len() * 4);
        words.extend(rope.frequencies.iter().map(|f| f.to_bits()));
    }
    let buffer = device.allocate("rope frequencies", words.len() * 4)?;
    copy_words(device, &buffer, 0, &words)?;
    let start = buffer.address();
    let ropes = offsets.into_iter().map(|offset| start.offset(offset));
    Ok((buffer, ropes.collect()))
}

/// Copies something small and waits for it.
pub(super) fn copy_words(
    device: &Arc<Device>,
    to: &Buffer,
    offset: usize,
    words: &[u32],
) -> Result<(), CudaError> {
    let mut host = device.allocate_host("constants", words.len() * 4)?;
    for (bytes, word) in host.bytes_mut().chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    device.copy_in(&host, to, offset, words.len() * 4)?;
    device.wait("copying constants")
}
