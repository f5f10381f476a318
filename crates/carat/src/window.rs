//! Conversations longer than the context: the oldest turns leave first.
//!
//! A turn begins with what a user says and ends before the next such message; it leaves whole or stays whole, with its tool calls
//! and their results. The rules at the beginning, the tools and the current turn always stay. When turns have to leave, enough do
//! to leave a quarter of the context free: then the conversation begins the same for some turns, and the keys and values that are
//! kept of its beginning can be used again.

use carat_engine::{
    Rejected,
    chat::{Chat, ChatError, Conversation},
};
use carat_text::{Message, Role};

/// Treatment of a conversation that is too long for the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// It is refused with both lengths.
    #[default]
    Refuse,
    /// Its oldest turns are left out.
    DropOldest,
}

/// The part of a growing conversation that is sent to the model.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Turns at the beginning that are left out.
    left_out: usize,
}

/// A conversation that fits.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// As far as it is sent.
    pub conversation: Conversation,
    /// Turns that left now and were still sent the last time.
    pub newly_left_out: usize,
}

impl Window {
    /// Turns at the beginning that are left out so far.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Begins anew, for another conversation.
    pub fn reset(&mut self) {
        self.left_out = 0;
    }

    /// The conversation without as many of its oldest turns as it takes to fit, with some room for an answer of up to
    /// `max_tokens`. An error if the current turn alone is too long.
    pub fn fit(
        &mut self,
        chat: &Chat,
        conversation: &Conversation,
        max_tokens: Option<usize>,
    ) -> Result<Fitted, ChatError> {
        let context = chat.engine().limits().room(0);
        let answer = max_tokens.unwrap_or(usize::MAX).min(context / 8).max(1);
        let starts = turn_starts(&conversation.messages);
        let most = starts.len().saturating_sub(1);
        self.left_out = self.left_out.min(most);
        let length = |left_out: usize| -> Result<usize, ChatError> {
            let sent = without(conversation, &starts, left_out);
            Ok(chat.prompt(&sent)?.len())
        };
        let before = self.left_out;
        if length(before)? + answer > context {
            self.left_out = first_that_holds(before + 1, most, |n| {
                Ok(length(n)? + answer.max(context / 4) <= context)
            })?;
        }
        let prompt = length(self.left_out)?;
        if prompt >= context {
            // The words for this are the engine's own.
            self.left_out = before;
            return Err(ChatError::Rejected(Rejected::OverContext {
                prompt,
                max_tokens: 1,
                context,
            }));
        }
        Ok(Fitted {
            conversation: without(conversation, &starts, self.left_out),
            newly_left_out: self.left_out - before,
        })
    }
}

/// The least number from `low` to `high` that holds; `high` if none does. What holds for one holds for all above it.
fn first_that_holds(
    low: usize,
    high: usize,
    holds: impl Fn(usize) -> Result<bool, ChatError>,
) -> Result<usize, ChatError> {
    let (mut low, mut high) = (low.min(high), high);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle)? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(high)
}

/// Starts of the turns. What stands before the first user's message, the rules apart, belongs to the first turn.
fn turn_starts(messages: &[Message]) -> Vec<usize> {
    let rules = rules(messages);
    let mut starts: Vec<usize> = (rules..messages.len())
        .filter(|&at| {
            let follows_user = at > 0 && messages[at - 1].role == Role::User;
            messages[at].role == Role::User && !follows_user
        })
        .collect();
    match starts.first_mut() {
        Some(first) => *first = rules,
        None if rules < messages.len() => starts.push(rules),
        None => {}
    }
    starts
}

/// Messages at the beginning that say how to answer.
fn rules(messages: &[Message]) -> usize {
    messages
        .iter()
        .take_while(|m| matches!(m.role, Role::System | Role::Developer))
        .count()
}

fn without(conversation: &Conversation, starts: &[usize], left_out: usize) -> Conversation {
    let messages = &conversation.messages;
    let kept = match left_out {
        0 => 0..0,
        n => rules(messages)..starts.get(n).copied().unwrap_or(messages.len()),
    };
    let mut sent = conversation.clone();
    sent.messages.drain(kept);
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(roles: &[Role]) -> Conversation {
        let message = |(n, role): (usize, &Role)| Message::new(*role, n.to_string());
        Conversation {
            messages: roles.iter().enumerate().map(message).collect(),
            ..Conversation::default()
        }
    }

    fn sent(roles: &[Role], left_out: usize) -> String {
        let conversation = conversation(roles);
        let starts = turn_starts(&conversation.messages);
        let sent = without(&conversation, &starts, left_out);
        let texts: Vec<&str> = sent.messages.iter().map(|m| m.content.as_str()).collect();
        texts.join(" ")
    }

    #[test]
    fn whole_turns_leave_and_the_rules_stay() {
        use Role::{Assistant, System, Tool, User};
        let roles = [
            System, User, Assistant, Tool, Assistant, User, User, Assistant, User,
        ];
        assert_eq!(turn_starts(&conversation(&roles).messages), [1, 5, 8]);
        assert_eq!(sent(&roles, 0), "0 1 2 3 4 5 6 7 8");
        assert_eq!(sent(&roles, 1), "0 5 6 7 8");
        assert_eq!(sent(&roles, 2), "0 8");
        // A greeting belongs to the turn that follows it.
        assert_eq!(turn_starts(&conversation(&[Assistant, User]).messages), [0]);
        assert!(turn_starts(&conversation(&[System]).messages).is_empty());
    }

    #[test]
    fn the_least_that_holds_is_found() {
        for least_holding in 0..6 {
            let found = first_that_holds(1, 5, |n| Ok(n >= least_holding)).unwrap();
            assert_eq!(found, least_holding.clamp(1, 5));
        }
    }
}
