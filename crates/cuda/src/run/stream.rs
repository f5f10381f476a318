//! Streams offloaded weights to the card beside the work of a program; which, when and where to is `compile/stream.rs`.
//!
//! All waiting is between streams, so it is captured in graphs like any launch: the copies of a replayed graph overlap as they do
//! when queued one by one.

use std::{collections::HashMap, sync::Arc};

use crate::{
    compile::{
        memory::Arena,
        stream::{Streams, Transfers},
    },
    device::{Address, Buffer, Device, Mark},
    error::CudaError,
    kernel::{MatrixAt, WeightOperand},
};

/// Device memory that streamed weights pass through.
pub(crate) struct StreamBuffers {
    /// `None` where nothing is streamed.
    buffer: Option<Buffer>,
    offsets: Vec<usize>,
}

impl StreamBuffers {
    pub(crate) fn new(device: &Arc<Device>, arena: &Arena) -> Result<StreamBuffers, CudaError> {
        let some = (arena.bytes > 0).then(|| device.allocate("streamed weights", arena.bytes));
        Ok(StreamBuffers {
            buffer: some.transpose()?,
            offsets: arena.offsets.clone(),
        })
    }

    /// Streams of the front and the tail, which live no longer than these buffers; `None` where there is nothing to stream.
    pub(crate) fn bind(
        &self,
        device: &Device,
        streams: Streams,
        weights: &HashMap<WeightOperand, MatrixAt>,
    ) -> Result<[Option<WeightStream>; 2], CudaError> {
        let stream = |transfers: Transfers| {
            let used = self.buffer.as_ref().filter(|_| !transfers.list.is_empty());
            used.map(|buffer| self.stream(device, transfers, buffer, weights))
                .transpose()
        };
        Ok([stream(streams.front)?, stream(streams.tail)?])
    }

    fn stream(
        &self,
        device: &Device,
        transfers: Transfers,
        buffer: &Buffer,
        weights: &HashMap<WeightOperand, MatrixAt>,
    ) -> Result<WeightStream, CudaError> {
        let bound = transfers.list.iter().map(|transfer| {
            Ok(Bound {
                from: weights[&transfer.operand].start,
                to: buffer.address().offset(self.offsets[transfer.buffer]),
                copied: device.mark()?,
                read: device.mark()?,
            })
        });
        Ok(WeightStream {
            bound: bound.collect::<Result<_, CudaError>>()?,
            transfers,
            started: device.mark()?,
        })
    }
}

/// The transfers of a program, bound to addresses.
pub(crate) struct WeightStream {
    transfers: Transfers,
    bound: Vec<Bound>,
    /// Behind all work before the program.
    started: Mark,
}

struct Bound {
    from: Address,
    to: Address,
    copied: Mark,
    /// Behind its last reader.
    read: Mark,
}

impl WeightStream {
    /// Has a call, and those behind it, read what it is the first to read from its buffer.
    pub(super) fn redirect(&self, call: usize, weights: &mut HashMap<WeightOperand, MatrixAt>) {
        for index in self.transfers.awaited_by(call) {
            let at = weights.get_mut(&self.transfers.list[index].operand);
            at.expect("it was bound from there").start = self.bound[index].to;
        }
    }

    /// Queues the first copies, behind all work before.
    pub(super) fn start(&self, device: &Device) -> Result<(), CudaError> {
        device.streaming_follows_work(&self.started)?;
        self.transfers
            .at_start()
            .try_for_each(|index| self.copy(device, index))
    }

    /// Has a call wait for what it reads.
    pub(super) fn before(&self, device: &Device, call: usize) -> Result<(), CudaError> {
        let mut awaited = self.transfers.awaited_by(call);
        awaited.try_for_each(|index| device.work_follows_streaming(&self.bound[index].copied))
    }

    /// Queues the copies into the buffers that a call was the last to read.
    pub(super) fn after(&self, device: &Device, call: usize) -> Result<(), CudaError> {
        self.transfers.freed_by(call).try_for_each(|(done, next)| {
            device.streaming_follows_work(&self.bound[done].read)?;
            self.copy(device, next)
        })
    }

    fn copy(&self, device: &Device, index: usize) -> Result<(), CudaError> {
        let bound = &self.bound[index];
        let bytes = self.transfers.list[index].bytes;
        device.stream_weights((bound.from, bound.to), bytes, &bound.copied)
    }
}
