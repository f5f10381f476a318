//! Notices a device that has stopped answering. Its thread cannot be freed from the call it hangs in, but everybody who waits
//! for it can be told.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

use crate::{events::EngineError, shared::Shared};

/// Looks now and then, until the engine's thread lets go of the other end of `ended` or a batch takes longer than `limit`.
pub(crate) fn run(shared: &Arc<Shared>, limit: Duration, ended: &Receiver<()>) {
    let pause = (limit / 8).clamp(Duration::from_millis(5), Duration::from_secs(1));
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
        let since = shared.snapshot().batch_since;
        let Some(stalled) = since.map(|s| s.elapsed()).filter(|took| *took > limit) else {
            continue;
        };
        tracing::error!(seconds = stalled.as_secs(), "the device does not answer");
        shared.close(&EngineError::Stalled(stalled));
        return;
    }
}
