//! An answer while it is generated: an iterator for threads that wait, a `Stream` for tasks that do not.

use std::{
    collections::VecDeque,
    ops::ControlFlow,
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use carat_engine::{
    Cancel, EngineError, EngineHandle, Event, Usage,
    chat::{AnswerReader, ChatEvent, ChatFinish, Prepared},
};
use carat_text::{Message, Part, Reply};
use futures_core::Stream;

use crate::{Chat, Error};

/// The pieces of one answer, in order. When it ends, or is dropped before, what there is of it becomes part of the conversation.
pub struct Answer<'a> {
    chat: &'a mut Chat,
    events: Events,
    reply: Reply,
    is_kept: bool,
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Completion {
    /// All pieces together.
    pub reply: Reply,
    /// Reason of the end.
    pub reason: ChatFinish,
    /// Counts and times of the request, also where it was cancelled.
    pub usage: Usage,
}

/// Ends an answer early, from any thread.
#[derive(Clone, Debug)]
pub struct Canceller(Cancel);

impl Canceller {
    /// Wants no more of it. What is on its way still comes, and then the end with the usage so far.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

impl<'a> Answer<'a> {
    pub(crate) fn new(chat: &'a mut Chat, events: Events) -> Answer<'a> {
        Answer {
            chat,
            events,
            reply: Reply::default(),
            is_kept: false,
        }
    }

    /// Wants no more of it; [`Answer::finish`] still gives the usage.
    pub fn cancel(&self) {
        self.events.cancel.cancel();
    }

    /// To end it from elsewhere while it is read here.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.events.cancel.clone())
    }

    /// Reason of the end, with counts and times, once it is over.
    pub fn end(&self) -> Option<(ChatFinish, Usage)> {
        self.events.end
    }

    /// Reads to the end.
    pub fn finish(mut self) -> Result<Completion, Error> {
        for piece in self.by_ref() {
            piece?;
        }
        let reply = self.reply.clone();
        match self.end() {
            Some((reason, usage)) => Ok(Completion {
                reply,
                reason,
                usage,
            }),
            None => Err(EngineError::Stopped.into()),
        }
    }

    fn gather(&mut self, piece: Option<Result<Part, Error>>) -> Option<Result<Part, Error>> {
        match &piece {
            Some(Ok(part)) => self.reply.add(part.clone()),
            Some(Err(_)) => {}
            None => self.keep(),
        }
        piece
    }

    /// Makes what there is of the answer part of the conversation; once.
    fn keep(&mut self) {
        let is_empty = self.reply == Reply::default();
        if !std::mem::replace(&mut self.is_kept, true) && !is_empty {
            self.chat.push(Message::from(self.reply.clone()));
        }
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<Part, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let piece = self.events.wait();
        self.gather(piece)
    }
}

impl Stream for Answer<'_> {
    type Item = Result<Part, Error>;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = std::task::ready!(self.events.poll(task));
        Poll::Ready(self.gather(piece))
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.keep();
    }
}

/// Events of a request between the engine's thread and whoever reads.
pub(crate) struct Events {
    queue: Arc<Queue>,
    cancel: Cancel,
    reader: AnswerReader,
    /// Parts that came about together.
    ready: VecDeque<Part>,
    end: Option<(ChatFinish, Usage)>,
    is_over: bool,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<Result<Event, EngineError>>,
    task: Option<Waker>,
    /// Nobody reads any more.
    is_closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's end of the queue. An engine that goes without a word leaves an error behind.
struct Feed(Arc<Queue>);

impl Feed {
    fn push(&self, event: Result<Event, EngineError>) -> ControlFlow<()> {
        let mut waiting = self.0.lock();
        if waiting.is_closed {
            return ControlFlow::Break(());
        }
        waiting.events.push_back(event);
        let task = waiting.task.take();
        drop(waiting);
        self.0.arrived.notify_one();
        if let Some(task) = task {
            task.wake();
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // After the end nobody reads it.
        let _ = self.push(Err(EngineError::Stopped));
    }
}

impl Events {
    pub(crate) fn begin(engine: &EngineHandle, prepared: Prepared) -> Result<Events, Error> {
        let queue = Arc::<Queue>::default();
        let feed = Feed(Arc::clone(&queue));
        let sink = move |event| feed.push(event);
        Ok(Events {
            cancel: engine.submit_to(prepared.request, Box::new(sink))?,
            queue,
            reader: prepared.reader,
            ready: VecDeque::new(),
            end: None,
            is_over: false,
        })
    }

    /// The next piece or the end, if it is there already.
    fn next_ready(&mut self) -> Poll<Option<Result<Part, Error>>> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(part)));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            let Some(event) = self.queue.lock().events.pop_front() else {
                return Poll::Pending;
            };
            match event {
                Ok(event) => self.read(event),
                Err(error) => {
                    self.is_over = true;
                    return Poll::Ready(Some(Err(error.into())));
                }
            }
        }
    }

    fn read(&mut self, event: Event) {
        let mut events = Vec::new();
        self.reader.read(event, &mut events);
        for event in events {
            match event {
                ChatEvent::Part(part) => self.ready.push_back(part),
                ChatEvent::Finished { reason, usage } => {
                    self.end = Some((reason, usage));
                    self.is_over = true;
                }
                ChatEvent::Started(_) | ChatEvent::Token(_) | ChatEvent::PromptToken(_) => {}
            }
        }
        if self.reader.has_stopped() && !self.is_over {
            self.cancel.cancel();
        }
    }

    fn wait(&mut self) -> Option<Result<Part, Error>> {
        loop {
            if let Poll::Ready(next) = self.next_ready() {
                return next;
            }
            let waiting = self.queue.lock();
            let waited = self
                .queue
                .arrived
                .wait_while(waiting, |waiting| waiting.events.is_empty());
            drop(waited);
        }
    }

    fn poll(&mut self, task: &mut Context<'_>) -> Poll<Option<Result<Part, Error>>> {
        loop {
            if let Poll::Ready(next) = self.next_ready() {
                return Poll::Ready(next);
            }
            let mut waiting = self.queue.lock();
            if waiting.events.is_empty() {
                waiting.task = Some(task.waker().clone());
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        if !self.is_over {
            self.cancel.cancel();
        }
    }
}
