//! Drafters on any backend: single steps against the published implementation, and whole answers drafted and verified by hand.

use carat_model::{
    TokenId,
    backend::{
        Backend, Batch, CompileOptions, DraftRun, Draw, Executor, Outputs, Run, token_feeds,
    },
    evaluate::{self, Pages},
    gemma4,
    gemma4_assistant::{self, Head},
    plan::Plan,
    sampling::Sampling,
};

use crate::{
    close,
    pairs::{Case, DraftStep, Pair},
};

/// A pair on a backend, with the pages of one text.
pub struct Drafting {
    executor: Box<dyn Executor>,
    plan: Plan,
    drafter: Plan,
    pages: Pages,
    outputs: Outputs,
}

/// Recorded rounds played again: what a backend proposes and draws where the published text stands, beside what was published.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// Drafted tokens that can be compared: those behind the same tokens.
    pub drafted: usize,
    /// Tokens drawn in verification whose predecessors are all of the published text.
    pub drawn: usize,
    /// Tokens that differ, and by how much this backend prefers its own: in units of the logits' root mean square.
    pub differing: Vec<f64>,
}

impl Replay {
    /// Whether every token that differs is a near tie for a backend of this relative error.
    ///
    /// Two logits that are each off by `error` of the root mean square differ by the square root of two times that, and by
    /// [`DEVIATIONS`] as much at the very most. So many near ties are few: nine tokens of ten are the published ones.
    pub fn agrees(&self, error: f64) -> bool {
        let widest = DEVIATIONS * std::f64::consts::SQRT_2 * error;
        let all = self.drafted + self.drawn;
        let are_ties = self.differing.iter().all(|gap| *gap <= widest);
        are_ties && all > 0 && 10 * self.differing.len() <= all
    }
}

/// Standard deviations of an error that is no mistake.
const DEVIATIONS: f64 = 4.0;

/// The largest relative errors of some draft steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors {
    /// Of the target's hidden state.
    pub hidden: f64,
    pub logits: f64,
    pub state: f64,
    /// Steps whose likeliest token is another.
    pub other_tokens: usize,
}

impl Drafting {
    /// Compiles a pair for texts of so many tokens.
    pub fn new(backend: &dyn Backend, pair: &Pair, head: Head, tokens: usize) -> Drafting {
        let plan = gemma4::plan(&pair.target);
        let drafter = gemma4_assistant::plan(&pair.drafter, head);
        let options = CompileOptions {
            probe: true,
            ..evaluate::options(tokens, tokens)
        };
        let weights = pair.target.weights.clone();
        let mut executor = backend
            .compile(&plan, weights, &options)
            .expect("small models fit");
        executor
            .attach_drafter(&drafter, pair.drafter.weights.clone(), 1)
            .expect("a drafter fits its target");
        Drafting {
            executor,
            pages: Pages::new(&plan, options.pages),
            plan,
            drafter,
            outputs: Outputs::default(),
        }
    }

    /// Feeds tokens at a position, the last `sampled` of them drawn greedily, and returns what they draw.
    pub fn feed(&mut self, tokens: &[TokenId], position: usize, sampled: usize) -> Vec<TokenId> {
        self.pages.advance(position);
        let run = Run {
            rows: 0..tokens.len(),
            position,
            pages: self.pages.tables(),
            sampled,
            table: None,
            visible_end: None,
        };
        let batch = Batch {
            feeds: &token_feeds(tokens),
            runs: &[run],
        };
        let sampling = Sampling::greedy();
        let ticket = self.executor.submit(&batch).expect("runs");
        let draws = vec![Draw::logits(&sampling); sampled];
        self.executor.draw(&ticket, &draws).expect("draws");
        let collected = self.executor.collect(ticket, &mut self.outputs);
        collected.expect("collects");
        self.outputs.rows.iter().map(|row| row.token).collect()
    }

    /// Drafts from a sampled row of what was fed last.
    pub fn draft(
        &mut self,
        row: usize,
        token: TokenId,
        position: usize,
        length: usize,
    ) -> Vec<TokenId> {
        self.pages.advance(position);
        let draft = DraftRun {
            row,
            token,
            position,
            pages: self.pages.tables(),
            length,
        };
        let mut drafted = self.executor.draft(&[draft]).expect("drafts");
        drafted.swap_remove(0)
    }

    /// Logits of the last step of the last draft.
    pub fn draft_logits(&self) -> &[f32] {
        let logits = self.executor.probed_draft(self.drafter.logits);
        logits.expect("probed")
    }

    /// Largest errors of the draft steps that follow a prompt.
    pub fn errors(&mut self, case: &Case, steps: &[DraftStep]) -> Errors {
        let mut errors = Errors::default();
        self.feed(&case.prompt, 0, 1);
        let hidden = self.executor.probed(self.plan.hidden).expect("probed");
        errors.hidden = close::relative_l2(hidden, &case.hidden);
        for (i, expected) in steps.iter().enumerate() {
            let drafted = self.draft(0, case.next, case.prompt.len(), i + 1);
            let logits = self.draft_logits();
            let has_logit = |(x, _): &(&f32, &f32)| x.is_finite();
            let pairs = logits.iter().zip(&expected.logits).filter(has_logit);
            let (found, wanted): (Vec<f32>, Vec<f32>) = pairs.unzip();
            let candidates = match expected.candidates {
                0 => expected.logits.len(),
                candidates => candidates,
            };
            assert_eq!(found.len(), candidates, "tokens with a logit");
            let state = self.executor.probed_draft(self.drafter.hidden);
            let state = state.expect("probed");
            errors.logits = errors.logits.max(close::relative_l2(&found, &wanted));
            errors.state = errors.state.max(close::relative_l2(state, &expected.state));
            errors.other_tokens += usize::from(drafted[i] != expected.token);
        }
        errors
    }

    /// Plays the recorded rounds of a case: each drafts behind the published text and then verifies the published draft,
    /// whatever was drafted, so that one token that rounding turns over does not change all that follow.
    pub fn replay(&mut self, case: &Case) -> Replay {
        let mut replay = Replay::default();
        let mut row = 0;
        let mut done = 0;
        let drawn = self.feed(&case.prompt, 0, 1);
        self.compare_drawn(&drawn, &case.greedy[..1], &mut replay);
        for (draft, accepted) in &case.rounds {
            let position = case.prompt.len() + done;
            let last = case.greedy[done];
            self.compare_draft((row, last, position), draft, &mut replay);
            let fed = [&[last], draft.as_slice()].concat();
            let drawn = self.feed(&fed, position, fed.len());
            let published = &case.greedy[done + 1..];
            let comparable = published.len().min(accepted + 1);
            self.compare_drawn(&drawn, &published[..comparable], &mut replay);
            done += accepted + 1;
            row = *accepted;
        }
        replay
    }

    /// Compares a draft with the published one, up to the first token that differs.
    fn compare_draft(
        &mut self,
        (row, last, position): (usize, TokenId, usize),
        published: &[TokenId],
        replay: &mut Replay,
    ) {
        let drafted = self.draft(row, last, position, published.len());
        let same = drafted.iter().zip(published);
        let same = same.take_while(|(a, b)| a == b).count();
        replay.drafted += published.len().min(same + 1);
        if same < published.len() {
            // Logits are kept of the last step alone.
            self.draft(row, last, position, same + 1);
            let gap = gap(self.draft_logits(), drafted[same], published[same]);
            replay.differing.push(gap);
        }
    }

    /// Compares what the first rows of the last batch drew with what follows in the published text.
    fn compare_drawn(&self, drawn: &[TokenId], published: &[TokenId], replay: &mut Replay) {
        let logits = self.executor.probed(self.plan.logits).expect("probed");
        let rows = logits.chunks_exact(logits.len() / drawn.len());
        for ((logits, drawn), published) in rows.zip(drawn).zip(published) {
            replay.drawn += 1;
            if drawn != published {
                replay.differing.push(gap(logits, *drawn, *published));
            }
        }
    }

    /// Greedy text of so many tokens, a token at a time.
    pub fn plain(&mut self, prompt: &[TokenId], most: usize, stop: &[TokenId]) -> Vec<TokenId> {
        let mut answer = self.feed(prompt, 0, 1);
        while answer.len() < most && !stop.contains(&answer[answer.len() - 1]) {
            let position = prompt.len() + answer.len() - 1;
            let last = answer[answer.len() - 1];
            answer.extend(self.feed(&[last], position, 1));
        }
        answer
    }

    /// The same, drafted and verified; and the rounds it took: what was drafted, and how much of it was right.
    pub fn speculative(
        &mut self,
        prompt: &[TokenId],
        (most, length): (usize, usize),
        stop: &[TokenId],
    ) -> (Vec<TokenId>, Vec<Round>) {
        self.verified(prompt, (most, stop), |drafting, row, answer| {
            let position = prompt.len() + answer.len() - 1;
            drafting.draft(row, answer[answer.len() - 1], position, length)
        })
    }

    /// Verifies drafts that are right up to a place of our choice: none of their tokens in the first round, one in the
    /// second and so on up to all `length`, then none again. Returns the answer and what each round accepted, as it must
    /// be if drafts change no token of the `plain` one.
    pub fn misled(
        &mut self,
        prompt: &[TokenId],
        plain: &[TokenId],
        length: usize,
    ) -> (Vec<TokenId>, Vec<Round>) {
        let mut rounds = 0;
        self.verified(prompt, (plain.len(), &[]), |_, _, answer| {
            let rest = &plain[answer.len().min(plain.len())..];
            let mut draft = rest[..rest.len().min(length)].to_vec();
            if let Some(token) = draft.get_mut(rounds % (length + 1)) {
                *token ^= 1;
            }
            rounds += 1;
            draft
        })
    }

    /// Greedy text of so many tokens, with drafts that `propose` makes behind a sampled row of the last batch and the answer
    /// so far.
    fn verified(
        &mut self,
        prompt: &[TokenId],
        (most, stop): (usize, &[TokenId]),
        mut propose: impl FnMut(&mut Drafting, usize, &[TokenId]) -> Vec<TokenId>,
    ) -> (Vec<TokenId>, Vec<Round>) {
        let mut answer = self.feed(prompt, 0, 1);
        let mut rounds = Vec::new();
        let mut row = 0;
        while answer.len() < most && !stop.contains(&answer[answer.len() - 1]) {
            let position = prompt.len() + answer.len() - 1;
            let last = answer[answer.len() - 1];
            let mut draft = propose(self, row, &answer);
            if let Some(end) = draft.iter().position(|token| stop.contains(token)) {
                draft.truncate(end + 1);
            }
            let fed = [&[last], draft.as_slice()].concat();
            let drawn = self.feed(&fed, position, fed.len());
            let same = |(a, b): &(&TokenId, &TokenId)| a == b;
            let accepted = draft.iter().zip(&drawn).take_while(same).count();
            answer.extend(&draft[..accepted]);
            rounds.push((draft, accepted));
            if stop.contains(&answer[answer.len() - 1]) {
                break;
            }
            answer.push(drawn[accepted]);
            row = accepted;
        }
        answer.truncate(most);
        (answer, rounds)
    }
}

/// A draft, and how many of its tokens were right.
pub type Round = (Vec<TokenId>, usize);

/// By how much the first of two tokens is preferred, in units of the logits' root mean square; infinite where the second has
/// no logit.
fn gap(logits: &[f32], preferred: TokenId, other: TokenId) -> f64 {
    let finite: Vec<f32> = logits.iter().copied().filter(|x| x.is_finite()).collect();
    let size = (close::squares(&finite) / finite.len() as f64).sqrt();
    let logit = |token: TokenId| f64::from(logits[token as usize]);
    (logit(preferred) - logit(other)) / size
}
