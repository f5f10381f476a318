//! Moves of KV pages between the device and host memory, in a stream beside that of the batches.
//!
//! A move waits for the batches before it. A batch after it waits for pages that are loaded, and for those that are saved if it
//! writes to them; otherwise it runs beside the copies.

use std::{collections::HashSet, sync::Arc};

use carat_model::{
    backend::{Batch, CompileOptions},
    kv::{HostPageId, KvGroup, PAGE_TOKENS, PageId, PageMove, PerGroup, pages_of},
    plan::Plan,
};

use crate::{
    device::{Buffer, Device, HostBuffer, Module, launch_aside},
    error::CudaError,
    kernel::{MAX_MOVES, MovePagesParams, PageSegment, PagesAt, move_pages_grid, params::Field},
};

/// The places in host memory, and moves that batches may have to wait for.
pub(crate) struct PageMover {
    module: Arc<Module>,
    groups: PerGroup<Option<Group>>,
    pending: Pending,
}

struct Group {
    /// Without moves.
    params: MovePagesParams,
    _segments: Buffer,
    host: HostBuffer,
}

impl PageMover {
    /// `kv` has the pages of each slot.
    pub(crate) fn new(
        device: &Arc<Device>,
        module: Arc<Module>,
        plan: &Plan,
        options: &CompileOptions,
        kv: &[PagesAt],
    ) -> Result<PageMover, CudaError> {
        let group = |group: KvGroup| -> Result<Option<Group>, CudaError> {
            let places = *options.host_pages.get(group);
            if places == 0 || !plan.uses(group) {
                return Ok(None);
            }
            let (mut segments, mut page_bytes) = (Vec::new(), 0);
            for (slot, at) in plan.slots.iter().zip(kv) {
                if slot.group != group {
                    continue;
                }
                let head_bytes = options.kv.get(group).head_bytes(slot.head_dim);
                let bytes = (PAGE_TOKENS * slot.kv_heads * head_bytes) as u64;
                let keys = (!at.is_tied()).then_some(at.keys);
                for pages in keys.into_iter().chain([at.values]) {
                    segments.push(PageSegment {
                        pages,
                        bytes,
                        offset: page_bytes,
                    });
                    page_bytes += bytes;
                }
            }
            let mut bytes = Vec::new();
            for segment in &segments {
                segment.put(&mut bytes);
            }
            let mut staged = device.allocate_host("page segments", bytes.len())?;
            staged.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
            let on_device = device.allocate("page segments", bytes.len())?;
            device.copy_in(&staged, &on_device, 0, bytes.len())?;
            device.wait("copying page segments")?;
            let host = device.allocate_host("saved pages", places * page_bytes as usize)?;
            Ok(Some(Group {
                params: MovePagesParams {
                    segments: on_device.address(),
                    host: host.address(),
                    page_bytes,
                    segment_count: segments.len() as u32,
                    move_count: 0,
                    is_load: 0,
                    padding: 0,
                },
                _segments: on_device,
                host,
            }))
        };
        Ok(PageMover {
            module,
            groups: PerGroup {
                full: group(KvGroup::Full)?,
                sliding: group(KvGroup::Sliding)?,
            },
            pending: Pending::default(),
        })
    }

    /// Queues checked moves behind all work so far.
    pub(crate) fn run(&mut self, device: &Device, moves: &[PageMove]) -> Result<(), CudaError> {
        self.pending.add(moves);
        device.moves_follow_work()?;
        for group in KvGroup::ALL {
            let Some(held) = self.groups.get(group) else {
                continue;
            };
            for is_load in [false, true] {
                let of_kind = moves.iter().filter(|m| {
                    m.places().0 == group && matches!(m, PageMove::Load { .. }) == is_load
                });
                let pairs: Vec<(u32, u32)> = of_kind
                    .map(PageMove::places)
                    .map(|(_, page, place)| (page.0, place.0))
                    .collect();
                for some in pairs.chunks(MAX_MOVES) {
                    let params = MovePagesParams {
                        move_count: some.len() as u32,
                        is_load: u32::from(is_load),
                        ..held.params
                    };
                    launch_aside(&self.module, move_pages_grid(), &params.with_moves(some))?;
                }
            }
        }
        Ok(())
    }

    /// The bytes of a place that exists, when moves to and from it are over.
    pub(crate) fn host_page(
        &mut self,
        device: &Device,
        group: KvGroup,
        place: HostPageId,
    ) -> Result<&mut [u8], CudaError> {
        device.wait_for_moves()?;
        let Some(held) = self.groups.get_mut(group) else {
            return Ok(&mut []);
        };
        let bytes = held.params.page_bytes as usize;
        Ok(&mut held.host.bytes_mut()[place.0 as usize * bytes..][..bytes])
    }

    /// Lets a batch that is queued next wait for the moves that it depends on.
    pub(crate) fn wait_before(
        &mut self,
        device: &Device,
        batch: &Batch<'_>,
    ) -> Result<(), CudaError> {
        if self.pending.concerns(batch) {
            device.work_follows_moves()?;
            self.pending = Pending::default();
        }
        Ok(())
    }
}

impl Drop for PageMover {
    fn drop(&mut self) {
        // Memory is freed once the stream of all work has been waited for.
        let _ = self.module.device().work_follows_moves();
    }
}

/// Moves that may not be over.
#[derive(Default)]
struct Pending {
    saved: HashSet<(KvGroup, PageId)>,
    is_loading: bool,
}

impl Pending {
    fn add(&mut self, moves: &[PageMove]) {
        for moved in moves {
            match *moved {
                PageMove::Save { group, from, .. } => {
                    self.saved.insert((group, from));
                }
                PageMove::Load { .. } => self.is_loading = true,
            }
        }
    }

    /// Whether a batch may read what is loaded, or writes what is saved.
    fn concerns(&self, batch: &Batch<'_>) -> bool {
        self.is_loading || !self.saved.is_empty() && self.is_written_by(batch)
    }

    fn is_written_by(&self, batch: &Batch<'_>) -> bool {
        let is_saved = |group: KvGroup, pages: &[PageId]| {
            pages
                .iter()
                .any(|page| self.saved.contains(&(group, *page)))
        };
        batch.runs.iter().any(|run| {
            let written = run.position / PAGE_TOKENS..pages_of(run.position + run.rows.len());
            KvGroup::ALL.iter().any(|&group| {
                let table = run.pages.get(group);
                is_saved(group, table.get(written.clone()).unwrap_or_default())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use carat_model::backend::{Run, token_feeds};

    use super::*;

    #[test]
    fn a_batch_waits_for_what_is_loaded_and_for_what_it_writes_over() {
        let table: Vec<PageId> = [5, 9, 2].map(PageId).to_vec();
        let concerned = |pending: &Pending, position: usize, rows: usize| {
            let run = Run {
                rows: 0..rows,
                position,
                pages: PerGroup {
                    full: table.as_slice(),
                    sliding: &[],
                },
                sampled: 0,
                visible_end: None,
                table: None,
            };
            pending.concerns(&Batch {
                feeds: &token_feeds(&vec![1; rows]),
                runs: &[run],
            })
        };
        let mut pending = Pending::default();
        assert!(!concerned(&pending, 0, 96));
        let save = |group, page| PageMove::Save {
            group,
            from: PageId(page),
            to: HostPageId(0),
        };
        pending.add(&[save(KvGroup::Full, 9), save(KvGroup::Sliding, 2)]);
        // Reads page 9, and writes page 2 of the other group.
        assert!(!concerned(&pending, 64, 3));
        assert!(concerned(&pending, 63, 1));
        assert!(concerned(&pending, 31, 2));
        pending.add(&[PageMove::Load {
            group: KvGroup::Full,
            from: HostPageId(0),
            to: PageId(11),
        }]);
        assert!(concerned(&pending, 64, 3));
    }
}
