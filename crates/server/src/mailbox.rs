//! Events on their way from the engine's thread to whoever writes the answer.
//!
//! A thousand streams have a thousand of these, nearly always empty, so it is a list and not a chain of blocks with room for 32 events
//! each. All that has come is taken at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A way in, which may be cloned, and the way out.
pub(crate) fn mailbox<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            waiting: Vec::new(),
            senders: 1,
            is_read: true,
        }),
        news: Notify::new(),
    });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Something has come, or the last sender has gone.
    news: Notify,
}

struct State<T> {
    waiting: Vec<T>,
    senders: usize,
    /// The receiver is there.
    is_read: bool,
}

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Sender<T>(Arc<Shared<T>>);

impl<T> Sender<T> {
    /// Leaves a value, without waiting; `false` if nobody will ever take it.
    pub(crate) fn send(&self, value: T) -> bool {
        let mut state = self.0.state();
        if !state.is_read {
            return false;
        }
        state.waiting.push(value);
        drop(state);
        self.0.news.notify_one();
        true
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.state().senders += 1;
        Sender(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state().senders -= 1;
        self.0.news.notify_one();
    }
}

pub(crate) struct Receiver<T>(Arc<Shared<T>>);

impl<T> Receiver<T> {
    /// Moves all that has come behind what is in `taken`, at least one value; `false` when all senders have gone and nothing is left.
    /// May be given up at any time without losing anything.
    pub(crate) async fn take(&mut self, taken: &mut Vec<T>) -> bool {
        loop {
            {
                let mut state = self.0.state();
                if !state.waiting.is_empty() {
                    taken.append(&mut state.waiting);
                    return true;
                }
                if state.senders == 0 {
                    return false;
                }
            }
            self.0.news.notified().await;
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_read = false;
        let unread = std::mem::take(&mut state.waiting);
        drop(state);
        drop(unread);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn all_that_was_sent_comes_in_order() {
        let (sender, mut receiver) = mailbox();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for n in 0..1000 {
                        assert!(sender.send((thread, n)));
                    }
                })
            })
            .collect();
        drop(sender);
        let mut all = Vec::new();
        while receiver.take(&mut all).await {}
        for thread in threads {
            thread.join().unwrap();
        }
        for thread in 0..4 {
            let mine: Vec<i32> = all.iter().filter(|x| x.0 == thread).map(|x| x.1).collect();
            assert_eq!(mine, (0..1000).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn who_waits_is_told_of_news_and_of_the_end() {
        let (sender, mut receiver) = mailbox();
        let mut all = Vec::new();
        // Given up before anything comes, which must cost nothing.
        let soon = Duration::from_millis(5);
        assert!(timeout(soon, receiver.take(&mut all)).await.is_err());
        let reader = tokio::spawn(async move {
            while receiver.take(&mut all).await {}
            all
        });
        for n in 0..3 {
            // The reader runs until it waits.
            tokio::task::yield_now().await;
            assert!(sender.send(n));
        }
        tokio::task::yield_now().await;
        assert!(!reader.is_finished());
        drop(sender);
        assert_eq!(reader.await.unwrap(), [0, 1, 2]);
    }

    #[tokio::test]
    async fn what_nobody_takes_is_refused() {
        let (sender, receiver) = mailbox();
        assert!(sender.send(Arc::new(())));
        let value = Arc::new(());
        sender.send(Arc::clone(&value));
        drop(receiver);
        assert_eq!(Arc::strong_count(&value), 1, "what was left is let go");
        assert!(!sender.send(value));
    }
}
