//! A conversation with a model.

use std::time::{SystemTime, UNIX_EPOCH};

use carat_engine::chat::{Conversation, Generation};
use carat_text::{Message, Tool};

use crate::{Answer, Error, Model, Overflow, answer::Events, window::Window};

/// A conversation so far, and the settings of its answers.
pub struct Chat {
    model: Model,
    conversation: Conversation,
    generation: Generation,
    /// No seed was asked for: each answer gets another.
    fresh_seeds: bool,
    overflow: Overflow,
    window: Window,
}

impl Chat {
    pub(crate) fn new(model: Model) -> Chat {
        Chat {
            generation: model.generation(),
            model,
            conversation: Conversation::default(),
            fresh_seeds: true,
            overflow: Overflow::default(),
            window: Window::default(),
        }
    }

    /// Sets the rules that come before everything else.
    #[must_use]
    pub fn system(mut self, text: impl Into<String>) -> Chat {
        self.conversation.messages.insert(0, Message::system(text));
        self
    }

    /// Offers tools. An answer then may hold calls, whose results go into [`Chat::push`] before [`Chat::answer`].
    #[must_use]
    pub fn tools(mut self, tools: Vec<Tool>) -> Chat {
        self.conversation.tools = tools;
        self
    }

    /// Lets the model think before it answers.
    #[must_use]
    pub fn thinking(mut self, thinking: bool) -> Chat {
        self.conversation.thinking = thinking;
        self
    }

    /// The most tokens of an answer.
    #[must_use]
    pub fn max_tokens(mut self, most: usize) -> Chat {
        self.generation.max_tokens = Some(most);
        self
    }

    /// Makes answers repeatable.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Chat {
        self.generation.sampling.seed = seed;
        self.fresh_seeds = false;
        self
    }

    /// Replaces all that is said about how answers are generated.
    #[must_use]
    pub fn generation(mut self, generation: Generation) -> Chat {
        self.generation = generation;
        self.fresh_seeds = false;
        self
    }

    /// Sets the treatment of a conversation that is longer than the context.
    #[must_use]
    pub fn overflow(mut self, overflow: Overflow) -> Chat {
        self.overflow = overflow;
        self
    }

    /// All that was said, answers included.
    pub fn messages(&self) -> &[Message] {
        &self.conversation.messages
    }

    /// Adds a message without asking for an answer: the result of a tool, or a turn of a conversation that went on elsewhere.
    pub fn push(&mut self, message: Message) {
        self.conversation.messages.push(message);
    }

    /// Says something, and begins the answer. Where that is refused, it is as if nothing had been said.
    pub fn send(&mut self, text: impl Into<String>) -> Result<Answer<'_>, Error> {
        self.push(Message::user(text));
        match self.begin() {
            Ok(events) => Ok(Answer::new(self, events)),
            Err(error) => {
                self.conversation.messages.pop();
                Err(error)
            }
        }
    }

    /// Begins the answer to what was said last.
    pub fn answer(&mut self) -> Result<Answer<'_>, Error> {
        let events = self.begin()?;
        Ok(Answer::new(self, events))
    }

    fn begin(&mut self) -> Result<Events, Error> {
        if self.fresh_seeds {
            self.generation.sampling.seed = crate::fresh_seed();
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        self.conversation.unix_time = now.and_then(|now| i64::try_from(now.as_secs()).ok());
        let engine = self.model.engine();
        let fitted;
        let sent = match self.overflow {
            Overflow::Refuse => &self.conversation,
            Overflow::DropOldest => {
                let most = self.generation.max_tokens;
                fitted = self.window.fit(engine, &self.conversation, most)?;
                &fitted.conversation
            }
        };
        let prompt = engine.prompt(sent)?;
        let prepared = engine.prepare(prompt, sent, &self.generation);
        Events::begin(engine.engine(), prepared)
    }
}
