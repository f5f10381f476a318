//! The engine with its thread, over the fake model. Tests that depend on when something happens hold the executor back
//! before each batch instead of guessing times.

use carat_model::{
    TokenId,
    backend::{Batch, Draw, HostPageId, Interrupt, KvGroup, Outputs, PageMove, Ticket},
    plan::Value,
};

use super::*;
use crate::{
    Event, Usage,
    core::{
        FinishReason, MissReason, Stats,
        testing::{FakeExecutor, Lookahead, alone, request, roomy, text},
    },
};

/// Asks before each batch whether and how to run it.
struct Guarded<F> {
    executor: FakeExecutor,
    guard: F,
}

impl<F: FnMut(&Batch<'_>) -> Result<(), BackendError>> Executor for Guarded<F> {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        (self.guard)(batch)?;
        self.executor.submit(batch)
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.executor.draw(ticket, draws)
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        self.executor.lookahead(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        self.executor.collect(ticket, out)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        self.executor.move_pages(moves)
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        self.executor.host_page(group, place)
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.executor.interrupt_by(interrupt);
    }

    fn probed(&self, _value: Value) -> Option<&[f32]> {
        None
    }
}

const WINDOW: Option<usize> = Some(64);

fn start(
    mut guard: impl FnMut(&Batch<'_>) -> Result<(), BackendError> + Send + 'static,
) -> EngineHandle {
    start_config(roomy(WINDOW).0, move |batch| guard(batch))
}

fn start_config(
    config: EngineConfig,
    guard: impl FnMut(&Batch<'_>) -> Result<(), BackendError> + Send + 'static,
) -> EngineHandle {
    let make = |limits: &Limits| {
        let executor = FakeExecutor::new(limits);
        Ok(Box::new(Guarded { executor, guard }) as Box<dyn Executor>)
    };
    EngineHandle::start_with(config, roomy(WINDOW).1, make).unwrap()
}

/// An engine that runs one batch for each message; dropping the sender lets it run freely.
fn start_held() -> (EngineHandle, Sender<()>) {
    let (go, gate) = mpsc::channel();
    let mut open = false;
    let engine = start(move |_| {
        open = open || gate.recv().is_err();
        Ok(())
    });
    (engine, go)
}

/// Runs what needs a limit that a busy machine keeps, with ever longer ones until it does.
fn patiently(mut attempt: impl FnMut(Duration) -> ControlFlow<(), &'static str>) {
    let mut limit = Duration::from_millis(50);
    while let ControlFlow::Continue(why) = attempt(limit) {
        limit *= 4;
        assert!(limit < Duration::from_mins(1), "{why}");
    }
}

fn device_failure() -> BackendError {
    BackendError::Device("the bus fell off".into())
}

fn answer(stream: TokenStream) -> (Vec<TokenId>, FinishReason, Usage) {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            Event::Token { id, .. } => tokens.push(id),
            Event::Started { .. } => {}
            Event::PromptToken { .. } => panic!("nobody asked for it"),
            Event::Finished { reason, usage } => return (tokens, reason, *usage),
        }
    }
    panic!("a stream without an end");
}

#[test]
fn a_stream_yields_the_answer_and_what_it_took() {
    let engine = start(|_| Ok(()));
    let asked = request(text(1, 100), 20);
    let (tokens, reason, usage) = answer(engine.submit(asked.clone()).unwrap());
    assert_eq!((tokens, reason), alone(&asked, 120, WINDOW));
    assert_eq!(usage.counts.prompt_tokens, 100);
    assert_eq!(usage.counts.generated_tokens, 20);
    assert_eq!(usage.counts.miss, Some(MissReason::NoMatch));
    assert!(usage.prefill > Duration::ZERO);
    assert!(usage.decode > Duration::ZERO);
}

#[test]
fn requests_from_many_threads_get_their_own_answers() {
    let engine = start(|_| Ok(()));
    thread::scope(|scope| {
        for n in 0..8 {
            let engine = engine.clone();
            scope.spawn(move || {
                let asked = request([text(1, 40), text(n, 20)].concat(), 30);
                let (tokens, ..) = answer(engine.submit(asked.clone()).unwrap());
                assert_eq!(tokens, alone(&asked, 90, WINDOW).0);
            });
        }
    });
}

#[test]
fn batches_fed_ahead_give_the_same_answers_and_end_on_time() {
    let config = roomy(WINDOW).0;
    let make = |limits: &Limits| {
        let mut executor = FakeExecutor::new(limits);
        executor.lookahead = Lookahead::Always;
        Ok(Box::new(executor) as Box<dyn Executor>)
    };
    let engine = EngineHandle::start_with(config, roomy(WINDOW).1, make).unwrap();
    thread::scope(|scope| {
        for n in 0..8 {
            let engine = engine.clone();
            scope.spawn(move || {
                let mut asked = request(text(n, 20), 40);
                // A token that it comes to, which is found too late: the row after it is thrown away.
                let (whole, _) = alone(&asked, 60, WINDOW);
                asked.stop_tokens = vec![whole[30]];
                let (tokens, reason, usage) = answer(engine.submit(asked.clone()).unwrap());
                let expected = alone(&asked, 60, WINDOW);
                assert_eq!((tokens, reason), expected);
                assert_eq!(usage.counts.generated_tokens, expected.0.len() + 1);
            });
        }
    });
    assert_eq!(engine.snapshot().stats.pages.full.held, 0);
}

#[test]
fn an_idle_engine_wakes_up_for_the_next_request() {
    let engine = start(|_| Ok(()));
    for _ in 0..3 {
        answer(engine.submit(request(text(1, 40), 3)).unwrap());
        assert_eq!(engine.snapshot().stats.running, 0);
    }
}

/// The event after the first, which tells of the prompt.
fn after_start(stream: &mut TokenStream) -> Option<Result<Event, EngineError>> {
    let first = stream.next();
    assert!(
        matches!(first, Some(Ok(Event::Started { .. }))),
        "{first:?}"
    );
    stream.next()
}

#[test]
fn logprobs_come_with_the_tokens_if_asked_for() {
    let engine = start(|_| Ok(()));
    let mut asked = request(text(1, 10), 1);
    asked.logprobs = Some(3);
    let first = after_start(&mut engine.submit(asked).unwrap())
        .unwrap()
        .unwrap();
    let Event::Token { logprob, top, .. } = first else {
        panic!("{first:?}")
    };
    assert!(logprob.is_some() && top.len() == 3);
}

#[test]
fn a_dropped_stream_frees_its_pages() {
    let (engine, go) = start_held();
    let mut stream = engine.submit(request(text(1, 20), 200)).unwrap();
    go.send(()).unwrap();
    assert!(matches!(
        after_start(&mut stream),
        Some(Ok(Event::Token { .. }))
    ));
    drop(stream);
    drop(go);
    // Commands are taken in order.
    answer(engine.submit(request(text(2, 20), 1)).unwrap());
    let stats = engine.snapshot().stats;
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert_eq!(stats.pages.full.held + stats.pages.sliding.held, 0);
}

#[test]
fn a_cancelled_stream_still_ends_with_its_usage() {
    let (engine, go) = start_held();
    let stream = engine.submit(request(text(1, 20), 200)).unwrap();
    stream.cancel();
    drop(go);
    let (tokens, reason, usage) = answer(stream);
    assert_eq!(reason, FinishReason::Cancelled);
    assert_eq!(usage.counts.generated_tokens, tokens.len());
}

#[test]
fn waiting_for_an_event_is_given_up_in_time() {
    let (engine, go) = start_held();
    let mut stream = engine.submit(request(text(1, 20), 1)).unwrap();
    assert!(stream.wait(Duration::ZERO).is_none());
    drop(go);
    assert!(matches!(
        after_start(&mut stream),
        Some(Ok(Event::Token { .. }))
    ));
    assert!(matches!(stream.next(), Some(Ok(Event::Finished { .. }))));
    assert!(
        stream.wait(Duration::MAX).is_none(),
        "nothing follows the end"
    );
}

#[test]
fn a_refused_batch_ends_its_requests_and_the_engine_goes_on() {
    let mut refused = false;
    let engine = start(move |_| {
        let first = !std::mem::replace(&mut refused, true);
        let what = "no such batch".to_owned();
        if first {
            Err(BackendError::Unsupported { what })
        } else {
            Ok(())
        }
    });
    let mut stream = engine.submit(request(text(1, 20), 5)).unwrap();
    let error = after_start(&mut stream).unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the request was ended by a failure");
    assert!(stream.next().is_none());
    let asked = request(text(1, 20), 5);
    let (tokens, ..) = answer(engine.submit(asked.clone()).unwrap());
    assert_eq!(tokens, alone(&asked, 25, WINDOW).0);
}

#[test]
fn a_failed_device_ends_every_request_and_stops_the_engine() {
    let mut config = roomy(WINDOW).0;
    config.max_sequences = 1;
    let (go, gate) = mpsc::channel::<()>();
    let engine = start_config(config, move |_| {
        let _ = gate.recv();
        Err(device_failure())
    });
    let running = engine.submit(request(text(1, 20), 5)).unwrap();
    let waiting = engine.submit(request(text(2, 20), 5)).unwrap();
    drop(go);
    for mut stream in [running, waiting] {
        let event = stream.find(|event| !matches!(event, Ok(Event::Started { .. })));
        assert!(matches!(event, Some(Err(_))), "{event:?}");
        assert!(stream.next().is_none());
    }
    // Whichever the second heard, the engine is gone as soon as its thread is.
    while let Ok(mut stream) = engine.submit(request(text(1, 20), 5)) {
        assert!(stream.next().unwrap().is_err());
    }
    assert!(matches!(
        engine.snapshot().failure,
        Some(EngineError::Failed(_))
    ));
    let rejected = engine.submit(request(text(1, 20), 5)).err();
    assert_eq!(rejected, Some(Rejected::Stopped));
}

#[test]
fn a_panicking_executor_stops_the_engine_not_the_program() {
    let engine = start(|_| panic!("as this test wants"));
    let stream = engine.submit(request(text(1, 20), 5)).unwrap();
    let waiting = engine.submit(request(text(2, 20), 5));
    for mut stream in [Ok(stream), waiting].into_iter().flatten() {
        let error = stream.next().unwrap().unwrap_err();
        assert!(
            matches!(&error, EngineError::Panicked(cause) if &**cause == "as this test wants"),
            "{error:?}"
        );
    }
    let failure = engine.snapshot().failure;
    assert!(matches!(failure, Some(EngineError::Panicked(_))));
    assert_eq!(
        engine.submit(request(text(1, 20), 5)).err(),
        Some(Rejected::Stopped)
    );
    // The process is fit for another engine.
    drop(engine);
    let engine = start(|_| Ok(()));
    let asked = request(text(1, 20), 5);
    let (tokens, ..) = answer(engine.submit(asked.clone()).unwrap());
    assert_eq!(tokens, alone(&asked, 25, WINDOW).0);
}

#[test]
fn a_device_that_hangs_is_noticed_and_does_not_hang_its_clients() {
    let mut config = roomy(WINDOW).0;
    config.max_sequences = 1;
    config.stall_limit = Duration::from_millis(50);
    let (go, gate) = mpsc::channel::<()>();
    let engine = start_config(config, move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let running = engine.submit(request(text(1, 20), 5)).unwrap();
    let waiting = engine.submit(request(text(2, 20), 5)).unwrap();
    let mut streams = [running, waiting];
    let error = streams[0].next().unwrap().unwrap_err();
    assert!(matches!(error, EngineError::Stalled(_)), "{error:?}");
    assert!(matches!(
        engine.snapshot().failure,
        Some(EngineError::Stalled(_))
    ));
    assert_eq!(
        engine.submit(request(text(1, 20), 5)).err(),
        Some(Rejected::Stopped)
    );
    // The device answers after all, which changes nothing.
    drop(go);
    let error = streams[1].next().unwrap().unwrap_err();
    let told = matches!(error, EngineError::Stalled(_) | EngineError::Stopped);
    assert!(told, "{error:?}");
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "what must not happen can only be waited for"
)]
fn an_idle_engine_is_not_taken_for_a_hanging_one() {
    patiently(|limit| {
        let mut config = roomy(WINDOW).0;
        config.stall_limit = limit;
        let engine = start_config(config, |_| Ok(()));
        let mut stream = engine.submit(request(text(1, 20), 3)).unwrap();
        if !stream.all(|event| event.is_ok()) {
            return ControlFlow::Continue("a batch takes as long as a hanging one may");
        }
        thread::sleep(3 * limit);
        assert!(engine.snapshot().failure.is_none());
        ControlFlow::Break(())
    });
}

#[test]
fn a_sink_that_closes_cancels_its_request_alone() {
    let engine = start(|_| Ok(()));
    let (heard, events) = mpsc::channel();
    let sink = move |event: Result<Event, EngineError>| {
        heard.send(event).unwrap();
        ControlFlow::Break(())
    };
    let asked = request(text(2, 20), 30);
    let other = engine.submit(asked.clone()).unwrap();
    engine
        .submit_to(request(text(1, 20), 200), Box::new(sink))
        .unwrap();
    assert!(matches!(events.recv(), Ok(Ok(Event::Started { .. }))));
    assert_eq!(answer(other).0, alone(&asked, 50, WINDOW).0);
    // The next answer is there only when the closed one's row is gone from the batches.
    answer(engine.submit(request(text(3, 20), 2)).unwrap());
    assert_eq!(engine.snapshot().stats.running, 0);
}

#[test]
fn a_stream_is_cancelled_from_another_thread_while_it_is_read() {
    let (engine, go) = start_held();
    let stream = engine.submit(request(text(1, 20), 200)).unwrap();
    let cancel = stream.canceller();
    let reader = thread::spawn(move || answer(stream));
    go.send(()).unwrap();
    cancel.cancel();
    drop(go);
    assert_eq!(reader.join().unwrap().1, FinishReason::Cancelled);
}

#[test]
fn time_limits_end_requests_that_wait_or_run_too_long() {
    let moment = Some(Duration::from_millis(1));
    let ample = Some(Duration::MAX);
    let timed = |n, deadline, queue_limit| Request {
        deadline,
        queue_limit,
        ..request(text(n, 20), 200)
    };
    patiently(|limit| {
        let mut config = roomy(WINDOW).0;
        config.max_sequences = 1;
        let (go, gate) = mpsc::channel();
        let mut open = false;
        let engine = start_config(config, move |_| {
            open = open || gate.recv().is_err();
            Ok(())
        });
        let since = Instant::now();
        let running = engine.submit(timed(1, ample, Some(limit))).unwrap();
        go.send(()).unwrap();
        while engine.snapshot().stats.running == 0 {
            if since.elapsed() >= limit {
                return ControlFlow::Continue("it did not start in time");
            }
            thread::yield_now();
        }
        let waiting = engine.submit(timed(2, ample, moment)).unwrap();
        let late = engine.submit(timed(3, moment, ample)).unwrap();
        // Batches are held back, so the answer is not over before its limit is.
        while since.elapsed() < limit + Duration::from_millis(5) {
            thread::yield_now();
        }
        drop(go);
        let (tokens, reason, _) = answer(running);
        assert_eq!(
            (tokens.len(), reason),
            (200, FinishReason::Length),
            "who has started waits no more"
        );
        for stream in [waiting, late] {
            let (tokens, reason, _) = answer(stream);
            assert_eq!((tokens.len(), reason), (0, FinishReason::Deadline));
        }
        ControlFlow::Break(())
    });
}

#[test]
fn a_snapshot_does_not_wait_for_the_batch() {
    let (engine, go) = start_held();
    let _stream = engine.submit(request(text(1, 20), 5)).unwrap();
    while engine.snapshot().batch_since.is_none() {
        thread::yield_now();
    }
    let Stats {
        running, waiting, ..
    } = engine.snapshot().stats;
    assert_eq!(running + waiting, 1);
    drop(go);
}

#[test]
fn totals_add_up() {
    let engine = start(|_| Ok(()));
    for _ in 0..2 {
        answer(engine.submit(request(text(1, 100), 20)).unwrap());
    }
    let totals = engine.snapshot().totals;
    assert_eq!(totals.requests, 2);
    assert_eq!(totals.prompt_tokens, 200);
    assert_eq!(totals.cached_tokens, 96);
    assert_eq!(totals.generated_tokens, 40);
    assert!(totals.batches >= 40);
}

#[test]
fn dropping_the_last_handle_ends_what_is_under_way() {
    let (engine, go) = start_held();
    let mut stream = engine.clone().submit(request(text(1, 20), 200)).unwrap();
    go.send(()).unwrap();
    assert!(matches!(stream.next(), Some(Ok(_))));
    let dropper = thread::spawn(move || drop(engine));
    drop(go);
    let last = stream.find(|e| !matches!(e, Ok(Event::Token { .. })));
    assert!(matches!(
        last,
        Some(Err(EngineError::Stopped) | Ok(Event::Finished { .. }))
    ));
    dropper.join().unwrap();
}

#[test]
fn a_full_queue_turns_requests_away_until_one_finishes() {
    let mut config = roomy(WINDOW).0;
    config.max_unfinished = 2;
    let (go, gate) = mpsc::channel::<()>();
    let engine = start_config(config, move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let streams = [1, 2].map(|n| engine.submit(request(text(n, 20), 5)).unwrap());
    let busy = engine.submit(request(text(3, 20), 5)).err();
    assert_eq!(busy, Some(Rejected::Busy { unfinished: 2 }));
    assert_eq!(engine.reserve().err(), busy);
    drop(go);
    for stream in streams {
        answer(stream);
    }
    // Room that is kept for one is not given to another, nor lost when it is not used.
    let kept = [engine.reserve().unwrap(), engine.reserve().unwrap()];
    assert_eq!(engine.submit(request(text(3, 20), 5)).err(), busy);
    let [kept, unused] = kept;
    drop(unused);
    let (sender, events) = mpsc::channel();
    let sink = Box::new(move |event| {
        let _ = sender.send(event);
        ControlFlow::Continue(())
    });
    let submitted = engine.submit_reserved(kept, request(text(3, 20), 5), sink);
    assert!(submitted.is_ok());
    assert!(engine.submit(request(text(4, 20), 5)).is_ok());
    assert!(events.into_iter().all(|event| event.is_ok()));
}

#[test]
fn a_model_that_cannot_be_prepared_is_an_error_at_the_start() {
    let (config, facts) = roomy(WINDOW);
    let started = EngineHandle::start_with(config.clone(), facts, |_| {
        Err(BackendError::OutOfMemory {
            needed_bytes: 2,
            free_bytes: 1,
        })
    });
    assert!(matches!(started, Err(StartError::Backend(_))));
    let dead = EngineHandle::start_with(config, facts, |_| panic!("as this test wants"));
    assert!(matches!(dead, Err(StartError::Died)));
}
