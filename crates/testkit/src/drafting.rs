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
    ) -> (Vec<TokenId>, Vec<(Vec<TokenId>, usize)>) {
        let mut answer = self.feed(prompt, 0, 1);
        let mut rounds = Vec::new();
        let mut row = 0;
        while answer.len() < most && !stop.contains(&answer[answer.len() - 1]) {
            let position = prompt.len() + answer.len() - 1;
            let last = answer[answer.len() - 1];
            let mut draft = self.draft(row, last, position, length);
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
