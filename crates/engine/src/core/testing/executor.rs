//! An executor that computes digests in place of logits, and holds every call to the contract.

use super::*;

/// A batch that was submitted and not collected.
struct InFlight {
    ticket: u64,
    /// Per sampled row: what was read, and the tokens up to it.
    sampled: Vec<(u64, Vec<TokenId>)>,
    outputs: Option<Outputs>,
    /// The host draws it, when it is collected.
    on_host: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookahead {
    Never,
    Always,
    /// But for some batches, which the host draws.
    Mostly,
}

pub(crate) struct FakeExecutor {
    pub(crate) pages: PerGroup<Vec<PageContents>>,
    host_pages: PerGroup<Vec<HostPage>>,
    /// Pages that were copied back.
    pub(crate) loads: usize,
    /// By page: the batch and the run that wrote it last.
    writers: PerGroup<Vec<(u64, usize)>>,
    window: Option<usize>,
    options: CompileOptions,
    /// Page tables by their names, as they were last.
    tables: HashMap<u32, PerGroup<Vec<PageId>>>,
    batches: u64,
    in_flight: VecDeque<InFlight>,
    /// Of the batch collected last: the tokens up to each of its sampled rows.
    last_sampled: Vec<Vec<TokenId>>,
    /// Drafts that were made.
    pub(crate) drafts: usize,
    pub(crate) lookahead: Lookahead,
    interrupt: Interrupt,
    /// Batches that were interrupted.
    pub(crate) interrupted: usize,
    /// Calls until one fails; 0 for none.
    pub(crate) fails_in: u64,
    /// The most runs of a batch; more are refused.
    pub(crate) max_runs: usize,
    /// A batch with a row at this position or behind it is refused.
    pub(crate) refused_from: usize,
    /// Batches that were refused.
    pub(crate) refused: usize,
    /// Rows of all batches.
    pub(crate) rows: usize,
    /// Batches that were submitted while another was in flight.
    pub(crate) ahead: usize,
    /// Chunk pages that batches have written.
    pub(crate) chunk_pages_written: usize,
}

impl FakeExecutor {
    pub(crate) fn new(limits: &Limits) -> FakeExecutor {
        let options = limits.compile_options();
        let named = PerGroup {
            full: options.named_pages(KvGroup::Full),
            sliding: options.named_pages(KvGroup::Sliding),
        };
        FakeExecutor {
            pages: named.map(|n| vec![[None; PAGE_TOKENS]; n]),
            host_pages: options.host_pages.map(|n| vec![[0; HOST_PAGE_BYTES]; n]),
            loads: 0,
            writers: named.map(|n| vec![(0, 0); n]),
            window: limits.model().window,
            options,
            tables: HashMap::new(),
            batches: 0,
            in_flight: VecDeque::new(),
            last_sampled: Vec::new(),
            drafts: 0,
            lookahead: Lookahead::Never,
            interrupt: Interrupt::default(),
            interrupted: 0,
            fails_in: 0,
            max_runs: usize::MAX,
            refused_from: usize::MAX,
            refused: 0,
            rows: 0,
            ahead: 0,
            chunk_pages_written: 0,
        }
    }

    /// Contents of a page in host memory.
    pub(crate) fn saved(&self, group: KvGroup, place: HostPageId) -> PageContents {
        from_bytes(&self.host_pages.get(group)[place.0 as usize])
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Fails when it is time to.
    fn call(&mut self) -> Result<(), BackendError> {
        self.fails_in = self.fails_in.saturating_sub(1);
        if self.fails_in == 1 {
            let what = "as this test wants".to_owned();
            return Err(BackendError::Unsupported { what });
        }
        Ok(())
    }

    /// Refuses a batch before anything is done.
    fn refuse(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let deepest = batch.runs.iter().map(|r| r.position + r.rows.len()).max();
        if batch.runs.len() > self.max_runs || deepest > Some(self.refused_from) {
            self.refused += 1;
            let what = "more than this test wants".to_owned();
            return Err(BackendError::Unsupported { what });
        }
        Ok(())
    }

    /// Whatever is said to be unchanged is, and the tables are remembered.
    fn remember(&mut self, batch: &Batch<'_>) {
        let mut named = HashSet::new();
        for run in batch.runs {
            let TableRef { id, unchanged } = run.table.expect("the engine names its tables");
            assert!(named.insert(id), "two tables of one name");
            let before = self.tables.entry(id).or_default();
            for group in KvGroup::ALL {
                let (before, now) = (before.get_mut(group), run.pages.get(group));
                for i in 0..*unchanged.get(group) {
                    let same = now[i] == before[i] || now[i] == PageId::FREED;
                    assert!(same, "{group:?} entry {i} of table {id} has changed");
                }
                before.clear();
                before.extend_from_slice(now);
            }
        }
    }

    fn groups(&self) -> &'static [KvGroup] {
        match self.window {
            Some(_) => &KvGroup::ALL,
            None => &[KvGroup::Full],
        }
    }

    /// The checks of `Batch::check`, which needs a plan.
    fn check(&self, batch: &Batch<'_>) {
        assert!(!batch.runs.is_empty(), "an empty batch");
        assert!(batch.feeds.len() <= self.options.max_rows, "too many rows");
        assert!(
            batch.sampled_count() <= self.options.max_sampled,
            "too many sampled rows"
        );
        let mut next = 0;
        for run in batch.runs {
            assert!(run.rows.start == next && !run.rows.is_empty(), "a gap");
            assert!(run.sampled <= run.rows.len());
            next = run.rows.end;
            let end = run.position + run.rows.len();
            for (place, visible) in run.visible_end.into_iter().flatten().enumerate() {
                let own = run.position + place + 1;
                assert!((own..=end).contains(&(*visible as usize)), "sees too far");
            }
        }
        assert_eq!(next, batch.feeds.len(), "rows without a run");
    }

    /// The token and identity of every row, with what it sees ahead.
    fn resolve(&self, batch: &Batch<'_>) -> Vec<(TokenId, u64)> {
        let before = self.in_flight.back();
        let token = |feed: &Feed<'_>| match feed {
            Feed::Token(token) | Feed::Embedding { token, .. } => *token,
            Feed::Sampled(row) => {
                let before = before.expect("a batch in flight to be fed by");
                assert!(!before.on_host, "fed by what the host has yet to draw");
                let outputs = before.outputs.as_ref().expect("it is drawn");
                outputs.rows[*row as usize].token
            }
        };
        let plain = |feed: &Feed<'_>| match feed {
            Feed::Embedding { row, token } => fed_identity(*token, Some(row)),
            other => fed_identity(token(other), None),
        };
        let plain: Vec<u64> = batch.feeds.iter().map(plain).collect();
        let places = batch.all_rows().map(|place| {
            let run = &batch.runs[place.run];
            let ahead = run.sliding_end(place.row) - place.position;
            let identity = fold(plain[place.row..place.row + ahead].iter().copied());
            (token(&batch.feeds[place.row]), identity)
        });
        places.collect()
    }

    fn place(run: &Run<'_>, group: KvGroup, position: usize) -> (PageId, usize) {
        let page = run.pages.get(group)[position / PAGE_TOKENS];
        assert_ne!(
            page,
            PageId::FREED,
            "{group:?} position {position} is freed"
        );
        (page, position % PAGE_TOKENS)
    }

    fn write(&mut self, number: usize, run: &Run<'_>, fed: &[(TokenId, u64)]) {
        let mut digest = match run.position.checked_sub(1) {
            Some(before) => self.read(number, run, KvGroup::Full, before).digest,
            None => 0,
        };
        for (position, &(token, identity)) in (run.position..).zip(&fed[run.rows.clone()]) {
            digest = mix(digest, identity);
            let entry = Entry {
                token,
                position,
                identity,
                digest,
            };
            for &group in self.groups() {
                let (page, slot) = FakeExecutor::place(run, group, position);
                let writer = &mut self.writers.get_mut(group)[page.0 as usize];
                assert!(
                    writer.0 < self.batches || writer.1 == number,
                    "two runs write {group:?} {page:?}"
                );
                *writer = (self.batches, number);
                let contents = &mut self.pages.get_mut(group)[page.0 as usize];
                if slot == 0 {
                    *contents = [None; PAGE_TOKENS];
                }
                contents[slot] = Some(entry);
            }
        }
    }

    fn read(&self, number: usize, run: &Run<'_>, group: KvGroup, position: usize) -> Entry {
        let (page, slot) = FakeExecutor::place(run, group, position);
        let writer = self.writers.get(group)[page.0 as usize];
        assert!(
            writer.0 < self.batches || writer.1 == number,
            "a run reads {group:?} {page:?}, which another writes"
        );
        let entry = self.pages.get(group)[page.0 as usize][slot]
            .unwrap_or_else(|| panic!("{group:?} {page:?} slot {slot} was never written"));
        assert_eq!(
            entry.position, position,
            "{group:?} {page:?} slot {slot} is another's"
        );
        entry
    }

    /// Reads all that the rows of a run see; returns what the sampled ones have read, with the tokens up to them.
    fn attend(&self, number: usize, run: &Run<'_>) -> Vec<(u64, Vec<TokenId>)> {
        let end = run.position + run.rows.len();
        let (mut chain, mut full) = (0, 0);
        let mut tokens = Vec::new();
        let mut sampled = Vec::new();
        let mut window_digests = VecDeque::new();
        for position in 0..end {
            let entry = self.read(number, run, KvGroup::Full, position);
            chain = mix(chain, entry.identity);
            assert_eq!(entry.digest, chain, "KV of another prefix at {position}");
            full = mix(full, entry.digest);
            tokens.push(entry.token);
            if self
                .window
                .is_some_and(|window| position + window > run.position)
            {
                let twin = self.read(number, run, KvGroup::Sliding, position);
                assert_eq!(entry, twin, "sliding KV of another prefix at {position}");
            }
            window_digests.push_back(entry.digest);
            if window_digests.len() > self.window.unwrap_or(0) {
                window_digests.pop_front();
            }
            if position + run.sampled >= end {
                let read = mix(full, fold(window_digests.iter().copied()));
                sampled.push((read, tokens.clone()));
            }
        }
        sampled
    }
}

impl FakeExecutor {
    /// Tokens that follow, as long as neither a penalty nor a constraint has a say in it, and at times others. Reads all that a
    /// drafter would.
    fn foresee(&self, draft: &DraftRun<'_>) -> Vec<TokenId> {
        let history = &self.last_sampled[draft.row];
        assert_eq!(history.len(), draft.position, "another row's state");
        let run = Run {
            rows: 0..1,
            position: draft.position,
            pages: draft.pages,
            sampled: 1,
            table: None,
            visible_end: None,
        };
        let entries = (0..draft.position).map(|position| {
            let (page, slot) = FakeExecutor::place(&run, KvGroup::Full, position);
            let entry = self.pages.full[page.0 as usize][slot].expect("it was written");
            assert_eq!(entry.token, history[position], "KV of another prefix");
            let seen = self.window.is_some_and(|w| position + w > draft.position);
            if seen {
                let (page, slot) = FakeExecutor::place(&run, KvGroup::Sliding, position);
                let twin = self.pages.sliding[page.0 as usize][slot];
                assert_eq!(twin, Some(entry), "sliding KV of another prefix");
            }
            entry.digest
        });
        let mut entries: Vec<u64> = entries.collect();
        let mut full = fold(entries.iter().copied());
        let mut tokens = vec![draft.token];
        while tokens.len() <= draft.length {
            let identity = fold([fed_identity(tokens[tokens.len() - 1], None)]);
            entries.push(mix(entries[entries.len() - 1], identity));
            full = mix(full, entries[entries.len() - 1]);
            let seen = self
                .window
                .map_or(entries.len(), |w| entries.len().saturating_sub(w));
            let read = mix(full, fold(entries[seen..].iter().copied()));
            let plain = Draw {
                sampling: &Sampling::greedy(),
                history: &[],
                mask: None,
                output: RowOutput::Token,
            };
            let right = drawn(read, &plain);
            let wrong = mix(read, 77).is_multiple_of(4);
            tokens.push((right + u32::from(wrong)) % VOCAB as u32);
        }
        tokens.split_off(1)
    }
}

impl Executor for FakeExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        self.call().inspect_err(|_| self.refused += 1)?;
        self.refuse(batch)?;
        if self.interrupt.is_raised() {
            self.interrupted += 1;
            return Err(BackendError::Interrupted);
        }
        assert!(self.in_flight.len() < 2, "a third batch in flight");
        if let Some(before) = self.in_flight.back() {
            assert!(
                before.outputs.is_some() || before.sampled.is_empty(),
                "the batch before is not drawn"
            );
            self.ahead += 1;
        }
        self.check(batch);
        self.remember(batch);
        let fed = self.resolve(batch);
        self.batches += 1;
        self.rows += batch.feeds.len();
        for (number, run) in batch.runs.iter().enumerate() {
            self.write(number, run, &fed);
        }
        let runs = batch.runs.iter().enumerate();
        let sampled = runs.flat_map(|(n, run)| self.attend(n, run)).collect();
        self.in_flight.push_back(InFlight {
            ticket: self.batches,
            sampled,
            outputs: None,
            on_host: false,
        });
        // Another layer's.
        let chunk_pages = &mut self.pages.sliding[self.options.pages.sliding..];
        self.chunk_pages_written += chunk_pages.iter().filter(|p| p[0].is_some()).count();
        chunk_pages.fill([None; PAGE_TOKENS]);
        Ok(Ticket(self.batches))
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        self.call()?;
        assert_eq!(self.in_flight.len(), 1, "a draw follows the results before");
        let batch = &mut self.in_flight[0];
        assert!(batch.ticket == ticket.0 && batch.outputs.is_none());
        assert_eq!(draws.len(), batch.sampled.len(), "a draw per sampled row");
        let row = |(draw, (read, tokens)): (&Draw<'_>, &(u64, Vec<TokenId>))| {
            // Whoever is over by now has no history, and gets what nobody would take for an answer.
            let over = draw.history.is_empty();
            assert!(
                over || draw.history == tokens,
                "a history of {} tokens, {} in the pages",
                draw.history.len(),
                tokens.len()
            );
            assert!(draw.mask.is_none_or(|mask| mask.lowest().is_some()));
            let token = if over { 0 } else { drawn(*read, draw) };
            let mut result = RowResult {
                token,
                ..RowResult::default()
            };
            if let RowOutput::Logprobs { top } = draw.output {
                result.logprob = Some(-0.5);
                result.top = (0..top as u32).map(|t| (t, -1.0)).collect();
            }
            result
        };
        batch.outputs = Some(Outputs {
            rows: draws.iter().zip(&batch.sampled).map(row).collect(),
        });
        batch.on_host =
            self.lookahead == Lookahead::Mostly && mix(batch.ticket, 5).is_multiple_of(5);
        Ok(())
    }

    fn lookahead(&self, ticket: &Ticket) -> bool {
        let batch = self.in_flight.back().expect("it is in flight");
        assert_eq!(batch.ticket, ticket.0);
        self.lookahead != Lookahead::Never && !batch.on_host
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let batch = self.in_flight.pop_front().expect("a batch was submitted");
        assert_eq!(ticket.0, batch.ticket, "tickets are collected in order");
        self.last_sampled = batch
            .sampled
            .into_iter()
            .map(|(_, tokens)| tokens)
            .collect();
        *out = batch.outputs.unwrap_or_default();
        self.call()
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        self.call()?;
        assert!(self.in_flight.is_empty(), "a draft beside a batch");
        self.drafts += drafts.len();
        Ok(drafts.iter().map(|draft| self.foresee(draft)).collect())
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        PageMove::check(moves, self.options.pages, self.options.host_pages)?;
        for step in moves {
            let (group, page, place) = step.places();
            let page = &mut self.pages.get_mut(group)[page.0 as usize];
            let host = &mut self.host_pages.get_mut(group)[place.0 as usize];
            match step {
                PageMove::Save { .. } => *host = to_bytes(page),
                PageMove::Load { .. } => {
                    *page = from_bytes(host);
                    self.loads += 1;
                }
            }
        }
        Ok(())
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        PageMove::check_place(group, place, self.options.host_pages)?;
        Ok(&mut self.host_pages.get_mut(group)[place.0 as usize])
    }

    fn probed(&self, _value: Value) -> Option<&[f32]> {
        None
    }
}

/// Words of an entry: whether there is one, and its fields.
const ENTRY_WORDS: usize = 5;
const HOST_PAGE_BYTES: usize = PAGE_TOKENS * ENTRY_WORDS * 8;
type HostPage = [u8; HOST_PAGE_BYTES];

fn to_bytes(page: &PageContents) -> HostPage {
    let mut bytes = [0; HOST_PAGE_BYTES];
    let words = page.iter().flat_map(|entry| match entry {
        None => [0; ENTRY_WORDS],
        Some(e) => [
            1,
            u64::from(e.token),
            e.position as u64,
            e.identity,
            e.digest,
        ],
    });
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

fn from_bytes(bytes: &HostPage) -> PageContents {
    let mut page = [None; PAGE_TOKENS];
    for (entry, bytes) in page.iter_mut().zip(bytes.chunks(ENTRY_WORDS * 8)) {
        let word = |n: usize| u64::from_le_bytes(bytes[8 * n..][..8].try_into().unwrap());
        *entry = (word(0) == 1).then(|| Entry {
            token: word(1) as TokenId,
            position: word(2) as usize,
            identity: word(3),
            digest: word(4),
        });
    }
    page
}
