//! One answer under way: which part of it comes next, and what that part allows.
//!
//! The parts follow each other at single tokens, so each has a matcher of its own, or none: free text and thoughts have constant
//! masks, and a call's matcher wakes at the mark that opens the call. Budgets of thought are counted here.

use std::{collections::VecDeque, sync::Arc};

use carat_engine::Constraint;
use carat_model::{TokenId, sampling::TokenMask};

use crate::{
    follower::{Follower, GaveUp, MaskThreads, Taken},
    grammars::Grammar,
    meter::{Meter, count},
    vocabulary::{Vocabulary, allow_words},
};

/// Everything that one answer may consist of.
pub(crate) struct Outline {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) mask_threads: Option<Arc<MaskThreads>>,
    /// A thought may come first.
    pub(crate) thought: bool,
    /// Tokens of thought after which it is closed.
    pub(crate) budget: Option<usize>,
    pub(crate) content: Content,
    pub(crate) calls: Option<Calls>,
}

impl Outline {
    /// At the beginning of a part that this grammar holds.
    fn follow(&self, grammar: &Grammar) -> Follower {
        let meter = Arc::clone(&self.meter);
        Follower::new(grammar.start(), meter, self.mask_threads.clone())
    }
}

/// Text of the answer, or what stands instead of it.
pub(crate) enum Content {
    /// Text of any kind, or none.
    Free,
    /// A text that this grammar accepts.
    Format(Grammar),
    /// Nothing: calls come instead.
    Nothing,
}

/// Calls of tools.
pub(crate) struct Calls {
    /// One call, after the mark that opens it.
    pub(crate) grammar: Grammar,
    /// One call may follow another.
    pub(crate) parallel: bool,
}

/// Part of the answer that the next token belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// None yet: the first token decides.
    Start {
        /// It may open a thought.
        thought: bool,
    },
    Thought {
        /// Its tokens so far.
        tokens: usize,
    },
    /// Free text.
    Text,
    /// Text of the format; by `Guide::format`.
    Format,
    /// A call; by `Guide::call`.
    Call,
    AfterCall,
    /// Nothing can be added.
    Complete,
    /// A matcher gave up. Nothing is allowed, so that the answer counts as cut off.
    Failed,
}

/// The constraint of one answer.
pub(crate) struct Guide {
    outline: Arc<Outline>,
    part: Part,
    format: Option<Follower>,
    call: Option<Follower>,
    /// Tokens that come next whatever the model would say.
    forced: VecDeque<TokenId>,
}

impl Guide {
    /// At the beginning of an answer, or within the thought that the prompt has opened.
    pub(crate) fn new(outline: Arc<Outline>, in_thought: bool) -> Guide {
        let format = match &outline.content {
            Content::Format(grammar) => Some(outline.follow(grammar)),
            Content::Free | Content::Nothing => None,
        };
        let thought = outline.thought;
        let mut guide = Guide {
            outline,
            part: if in_thought {
                Part::Thought { tokens: 0 }
            } else {
                Part::Start { thought }
            },
            format,
            call: None,
            forced: VecDeque::new(),
        };
        guide.force();
        guide.begin_mask();
        guide
    }

    /// The matcher that the next mask is made by; `None` if that is a constant or what comes next is forced.
    fn matcher(&self) -> Option<&Follower> {
        if !self.forced.is_empty() {
            return None;
        }
        match self.part {
            Part::Start { .. } | Part::Format => self.format.as_ref(),
            Part::Call => self.call.as_ref(),
            _ => None,
        }
    }

    /// Has the next mask computed beside whatever comes before it is asked for.
    fn begin_mask(&self) {
        if let Some(matcher) = self.matcher() {
            matcher.begin_mask();
        }
    }

    /// Takes a token that may open a part: the first of the answer, or one after a part.
    fn open(&mut self, token: TokenId) {
        let marks = *self.outline.vocabulary.vocab().marks();
        let calls = self.outline.calls.as_ref();
        let is_start = matches!(self.part, Part::Start { .. });
        if self.part == (Part::Start { thought: true }) && Some(token) == marks.channel_start {
            self.part = Part::Thought { tokens: 0 };
            let header = self.outline.vocabulary.thought_header();
            self.forced.extend(header);
        } else if let Some(calls) = calls.filter(|_| Some(token) == marks.call_start) {
            self.call = Some(self.outline.follow(&calls.grammar));
            self.part = Part::Call;
        } else if is_start && self.format.is_some() {
            self.part = Part::Format;
            self.follow(token);
        } else if matches!(self.outline.content, Content::Free) && self.part != Part::AfterCall {
            self.part = Part::Text;
        } else {
            self.fail();
        }
    }

    /// Takes a token of a part that has a matcher.
    fn follow(&mut self, token: TokenId) {
        let (matcher, then) = match self.part {
            Part::Call => (&self.call, Part::AfterCall),
            _ => (&self.format, Part::Complete),
        };
        let Some(matcher) = matcher else { return };
        match matcher.consume(token) {
            Ok(Taken::GoesOn) => {}
            Ok(Taken::Last) => {
                self.part = then;
                self.call = None;
            }
            Err(GaveUp) => self.fail(),
        }
    }

    fn fail(&mut self) {
        self.part = Part::Failed;
        self.forced.clear();
        count(&self.outline.meter.failed);
    }

    /// Finds what must come next.
    fn force(&mut self) {
        if !self.forced.is_empty() {
            return;
        }
        let vocabulary = &self.outline.vocabulary;
        let calls = self.outline.calls.as_ref();
        let call_start = vocabulary.vocab().marks().call_start;
        let matcher = match self.part {
            Part::Start { thought: false } => match self.outline.content {
                Content::Nothing => {
                    self.forced.extend(call_start);
                    None
                }
                Content::Format(_) if calls.is_none() => self.format.as_ref(),
                _ => None,
            },
            Part::Thought { tokens } if self.outline.budget.is_some_and(|most| tokens >= most) => {
                self.forced.extend(vocabulary.thought_end());
                None
            }
            Part::Format => self.format.as_ref(),
            Part::Call => self.call.as_ref(),
            Part::AfterCall if calls.is_none_or(|calls| !calls.parallel) => {
                self.forced.extend(vocabulary.stop(true));
                None
            }
            Part::Complete => {
                self.forced.extend(vocabulary.stop(false));
                None
            }
            _ => None,
        };
        match matcher.map(Follower::forced) {
            Some(Ok(forced)) => self.forced.extend(forced),
            Some(Err(GaveUp)) => self.fail(),
            None => {}
        }
    }
}

/// Allows what a matcher allows. `false` if it gave up.
fn allow_matched(matcher: &Follower, mask: &mut TokenMask) -> bool {
    let shown = matcher.mask(|allowed| allow_words(allowed.as_slice(), mask));
    shown.is_ok()
}

impl Constraint for Guide {
    fn accept(&mut self, token: TokenId) {
        let was_forced = self.forced.front() == Some(&token);
        if was_forced {
            self.forced.pop_front();
            count(&self.outline.meter.forced);
        } else {
            self.forced.clear();
        }
        let marks = *self.outline.vocabulary.vocab().marks();
        match self.part {
            // Whoever goes on after the end of an answer is on their own.
            _ if self.outline.vocabulary.is_stop(token) => {}
            Part::Start { .. } | Part::Text | Part::AfterCall => self.open(token),
            Part::Thought { .. } if Some(token) == marks.channel_end => {
                self.part = Part::Start { thought: false };
            }
            Part::Thought { tokens } if !was_forced => {
                self.part = Part::Thought { tokens: tokens + 1 };
            }
            Part::Format | Part::Call => self.follow(token),
            Part::Thought { .. } | Part::Complete | Part::Failed => {}
        }
        self.force();
        self.begin_mask();
    }

    fn mask(&mut self, mask: &mut TokenMask) {
        if let Some(token) = self.forced() {
            mask.allow(token);
            return;
        }
        let outline = &self.outline;
        let vocabulary = &outline.vocabulary;
        let marks = vocabulary.vocab().marks();
        let call_start = marks.call_start.filter(|_| outline.calls.is_some());
        let mut works = true;
        let mut opening = [None; 2];
        match self.part {
            Part::Start { thought } => {
                if let Some(format) = &self.format {
                    works = allow_matched(format, mask);
                    vocabulary.forbid_result(mask);
                } else if matches!(outline.content, Content::Free) {
                    vocabulary.allow_text(mask);
                    vocabulary.allow_stops(false, mask);
                }
                opening = [marks.channel_start.filter(|_| thought), call_start];
            }
            Part::Thought { .. } => {
                vocabulary.allow_text(mask);
                opening = [marks.channel_end, None];
            }
            Part::Text => {
                vocabulary.allow_text(mask);
                vocabulary.allow_stops(false, mask);
                opening = [call_start, None];
            }
            Part::AfterCall => {
                vocabulary.allow_stops(true, mask);
                opening = [call_start, None];
            }
            Part::Format => {
                if let Some(format) = &self.format {
                    works = allow_matched(format, mask);
                    vocabulary.forbid_result(mask);
                }
            }
            Part::Call => {
                if let Some(call) = &self.call {
                    works = allow_matched(call, mask);
                }
            }
            Part::Complete => vocabulary.allow_stops(false, mask),
            Part::Failed => {}
        }
        for mark in opening.into_iter().flatten() {
            mask.allow(mark);
        }
        if !works {
            mask.clear();
            self.fail();
        }
    }

    fn forced(&self) -> Option<TokenId> {
        self.forced.front().copied()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Guide {
            outline: Arc::clone(&self.outline),
            part: self.part,
            format: self.format.as_ref().map(Follower::fork),
            call: self.call.as_ref().map(Follower::fork),
            forced: self.forced.clone(),
        })
    }
}
