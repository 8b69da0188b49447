use std::mem;

use serde_json::Value;

use crate::tools::{Quote, ToolCall, ToolSchemas};
use crate::{ThinkingMarkers, ToolParser};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEvent {
    /// More of what the user is to read.
    Text(String),
    /// More of what the model thinks before it answers.
    Reasoning(String),
    /// A call of a tool begins. Its arguments and its end follow before anything else does.
    ToolCallBegin {
        /// How many calls came before it.
        index: usize,
        /// The id that the model gave it, else a new one.
        id: String,
        /// The tool's name, which need not be that of a tool that was offered.
        name: String,
    },
    /// More of the text of the JSON object that is a call's arguments.
    ToolCallArguments {
        /// The call's index.
        index: usize,
        /// The part.
        fragment: String,
    },
    /// A call is complete, and its arguments are a JSON object.
    ToolCallEnd {
        /// The call's index.
        index: usize,
    },
    /// What looked like a call was none, or did not end. It follows as text.
    Malformed,
}

/// Turns the text of an answer, while it arrives, into what it is: text, reasoning and calls of tools.
///
/// The joined result does not depend on where the text was split. Text is held back only while it may be the beginning
/// of a marker, or white space before one; a call until it is complete, so that a call that begins also ends, with valid
/// arguments. Markup that is malformed, or ends with the answer before the call does, is text.
///
/// Reasoning begins before any text of the answer, as often as it is opened there: afterwards its marker is something
/// that the model writes about. Tool markup in reasoning is reasoning. White space around reasoning is left out, and
/// that between calls and the beginning or the end of the text.
///
/// Memory and time grow linearly with the text.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    tools: Option<ToolParser>,
    schemas: ToolSchemas,
    thinking: Option<ThinkingMarkers>,
    new_id: fn() -> String,
    state: State,
    /// What is not understood yet, from the state's beginning on.
    buffer: String,
    /// White space that may turn out to surround a marker.
    space: String,
    /// Whether a marker came after the last text.
    after_markup: bool,
    /// Whether text was seen that is more than white space.
    has_text: bool,
    calls: usize,
    /// Quotes do not pair up in this answer, so end markers within them count.
    ignores_quotes: bool,
}

#[derive(Clone, Debug)]
enum State {
    Text,
    Reasoning { has_text: bool },
    Call(Scan),
}

/// How far the end of a call was looked for.
#[derive(Clone, Debug, Default)]
struct Scan {
    at: usize,
    quote: Option<Quote>,
    /// An end marker stood within quotes.
    has_hidden_end: bool,
}

/// Whether a text begins with a marker.
enum Begins {
    Yes,
    /// It may, once there is more of it.
    Perhaps,
    No,
}

fn begins(text: &str, marker: &str, is_last: bool) -> Begins {
    if text.starts_with(marker) {
        Begins::Yes
    } else if !is_last && marker.starts_with(text) {
        Begins::Perhaps
    } else {
        Begins::No
    }
}

/// Where the first of the markers begins, or may begin, and which one it is.
fn find<'a>(text: &str, markers: &[&'a str], is_last: bool) -> (usize, Option<&'a str>) {
    for (at, _) in text.char_indices() {
        let rest = &text[at..];
        for marker in markers {
            match begins(rest, marker, is_last) {
                Begins::Yes => return (at, Some(marker)),
                Begins::Perhaps => return (at, None),
                Begins::No => {}
            }
        }
    }
    (text.len(), None)
}

impl AnswerParser {
    /// A parser that takes everything for text.
    pub fn plain() -> Self {
        Self {
            tools: None,
            schemas: ToolSchemas::default(),
            thinking: None,
            new_id: String::new,
            state: State::Text,
            buffer: String::new(),
            space: String::new(),
            after_markup: false,
            has_text: false,
            calls: 0,
            ignores_quotes: false,
        }
    }

    /// Finds reasoning, in an answer to this prompt.
    #[must_use]
    pub fn with_thinking(mut self, markers: &ThinkingMarkers, prompt: &str) -> Self {
        if markers.opened_by(prompt) {
            self.state = State::Reasoning { has_text: false };
        }
        self.thinking = Some(markers.clone());
        self
    }

    /// Finds calls. `tools` are what was offered, in OpenAI's shape: the schemas in it give arguments their types where
    /// the markup has none. `new_id` makes ids of calls.
    #[must_use]
    pub fn with_tools(mut self, parser: ToolParser, tools: &[Value], new_id: fn() -> String) -> Self {
        self.tools = Some(parser);
        self.schemas = ToolSchemas::new(tools);
        self.new_id = new_id;
        self
    }

    /// Reads more text; returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.buffer.push_str(text);
        self.run(false)
    }

    /// Ends the answer; returns what was held back.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        let mut events = self.run(true);
        if matches!(self.state, State::Call(_)) {
            self.malformed("", "", &mut events);
        }
        if !self.after_markup && matches!(self.state, State::Text) {
            push_text(&mut events, &mem::take(&mut self.space));
        }
        self.space.clear();
        events
    }

    fn run(&mut self, is_last: bool) -> Vec<AnswerEvent> {
        let mut buffer = mem::take(&mut self.buffer);
        let (mut events, mut at) = (Vec::new(), 0);
        while let Some(rest) = buffer.get(at..).filter(|rest| !rest.is_empty())
            && let Some(read) = self.step(rest, is_last, &mut events)
        {
            at += read;
        }
        buffer.drain(..at);
        self.buffer = buffer;
        events
    }

    /// Reads from `rest`, which is not empty. Returns how much of it is understood, which may be nothing if the state is
    /// another; none if more text is needed.
    fn step(&mut self, rest: &str, is_last: bool, events: &mut Vec<AnswerEvent>) -> Option<usize> {
        match &mut self.state {
            State::Text => self.step_text(rest, is_last, events),
            State::Reasoning { has_text } => {
                let has_text = *has_text;
                self.step_reasoning(rest, has_text, is_last, events)
            }
            State::Call(scan) => {
                let scan = mem::take(scan);
                self.step_call(rest, scan, is_last, events)
            }
        }
    }

    fn step_text(&mut self, rest: &str, is_last: bool, events: &mut Vec<AnswerEvent>) -> Option<usize> {
        if !self.has_text
            && let Some(thinking) = &self.thinking
        {
            let lead = rest.len() - rest.trim_start().len();
            if lead > 0 {
                self.space.push_str(&rest[..lead]);
                return Some(lead);
            }
            match begins(rest, &thinking.start, is_last) {
                Begins::Yes => {
                    let read = thinking.start.len();
                    self.space.clear();
                    self.state = State::Reasoning { has_text: false };
                    return Some(read);
                }
                Begins::Perhaps => return None,
                Begins::No => {}
            }
        }
        let mut markers: Vec<&str> = Vec::new();
        if let Some(tools) = self.tools {
            markers.push(tools.start());
        }
        markers.extend(self.thinking.as_ref().map_or(&[][..], ThinkingMarkers::structure));
        let (end, marker) = find(rest, &markers, is_last);
        self.text(&rest[..end], events);
        let Some(marker) = marker else { return (end > 0).then_some(end) };
        if self.tools.is_some_and(|tools| tools.start() == marker) {
            self.state = State::Call(Scan::default());
        } else {
            self.mark();
        }
        Some(end + marker.len())
    }

    fn step_reasoning(
        &mut self,
        rest: &str,
        has_text: bool,
        is_last: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> Option<usize> {
        let thinking = self.thinking.as_ref()?;
        if !has_text {
            let lead = rest.len() - rest.trim_start().len();
            if lead > 0 {
                return Some(lead);
            }
            // Some models open what the prompt has opened already.
            match begins(rest, &thinking.start, is_last) {
                Begins::Yes => return Some(thinking.start.len()),
                Begins::Perhaps => return None,
                Begins::No => {}
            }
        }
        let (end, marker) = find(rest, &[&thinking.end], is_last);
        let read = end + marker.map_or(0, str::len);
        let (is_over, reasoning) = (marker.is_some(), &rest[..end]);
        let visible = reasoning.trim_end();
        if !visible.is_empty() {
            let text = mem::take(&mut self.space) + visible;
            match events.last_mut() {
                Some(AnswerEvent::Reasoning(before)) => before.push_str(&text),
                _ => events.push(AnswerEvent::Reasoning(text)),
            }
            self.state = State::Reasoning { has_text: true };
        }
        self.space.push_str(&reasoning[visible.len()..]);
        if is_over {
            self.state = State::Text;
            self.mark();
            self.space.clear();
        }
        (read > 0).then_some(read)
    }

    fn step_call(
        &mut self,
        payload: &str,
        mut scan: Scan,
        is_last: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> Option<usize> {
        let Some(tools) = self.tools else { return Some(0) };
        let end = self.find_call_end(payload, &mut scan, is_last);
        let (content, marker) = match end {
            Some(at) => (&payload[..at], tools.end()),
            None if is_last => (payload, ""),
            None => {
                self.state = State::Call(scan);
                return None;
            }
        };
        let is_complete = end.is_some() || tools.payload_has_end();
        match tools.parse(content, &self.schemas).filter(|_| is_complete) {
            Some(calls) => {
                self.state = State::Text;
                self.mark();
                calls.into_iter().for_each(|call| self.call(call, events));
            }
            None if scan.has_hidden_end => {
                self.ignores_quotes = true;
                self.state = State::Call(Scan::default());
                return Some(0);
            }
            None => self.malformed(content, marker, events),
        }
        Some(content.len() + marker.len())
    }

    /// Where the end marker is, if it is there.
    fn find_call_end(&self, payload: &str, scan: &mut Scan, is_last: bool) -> Option<usize> {
        let tools = self.tools?;
        let (end, quote) = (tools.end(), tools.quote().filter(|_| !self.ignores_quotes));
        if end.is_empty() {
            return None;
        }
        while let Some(rest) = payload.get(scan.at..)
            && let Some(character) = rest.chars().next()
        {
            let mut step = character.len_utf8();
            let marker = begins(rest, end, is_last);
            // What may begin or end a quote here.
            let mark = match scan.quote {
                Some(open) => Some(open.close),
                None => quote.map(|quote| quote.open),
            };
            let quoting = mark.map_or(Begins::No, |mark| begins(rest, mark, is_last));
            match (scan.quote, marker, quoting) {
                (None, Begins::Yes, _) => return Some(scan.at),
                (Some(open), ..) if open.escapes && character == '\\' => match rest.chars().nth(1) {
                    Some(escaped) => step += escaped.len_utf8(),
                    None if is_last => {}
                    None => return None,
                },
                (_, Begins::Perhaps, _) | (_, _, Begins::Perhaps) => return None,
                (None, _, Begins::Yes) => {
                    step = mark.map_or(step, str::len);
                    scan.quote = quote;
                }
                (Some(_), _, Begins::Yes) => {
                    step = mark.map_or(step, str::len);
                    scan.quote = None;
                }
                (Some(_), Begins::Yes, _) => scan.has_hidden_end = true,
                (_, Begins::No, Begins::No) => {}
            }
            scan.at += step;
        }
        None
    }

    fn call(&mut self, call: ToolCall, events: &mut Vec<AnswerEvent>) {
        let index = self.calls;
        self.calls += 1;
        let id = call.id.unwrap_or_else(self.new_id);
        events.push(AnswerEvent::ToolCallBegin { index, id, name: call.name });
        events.push(AnswerEvent::ToolCallArguments { index, fragment: call.arguments });
        events.push(AnswerEvent::ToolCallEnd { index });
    }

    /// Gives markup out as the text that it is.
    fn malformed(&mut self, content: &str, marker: &str, events: &mut Vec<AnswerEvent>) {
        events.push(AnswerEvent::Malformed);
        self.state = State::Text;
        let start = self.tools.map_or("", ToolParser::start);
        for text in [start, content, marker] {
            self.text(text, events);
        }
    }

    fn mark(&mut self) {
        self.after_markup = true;
    }

    fn text(&mut self, text: &str, events: &mut Vec<AnswerEvent>) {
        if self.tools.is_none() && self.thinking.is_none() {
            return push_text(events, text);
        }
        let visible = text.trim_end();
        if visible.is_empty() {
            return self.space.push_str(text);
        }
        let mut space = mem::take(&mut self.space);
        let mut shown = visible;
        if self.after_markup && !self.has_text {
            space.clear();
            shown = visible.trim_start();
        }
        push_text(events, &space);
        push_text(events, shown);
        self.space.push_str(&text[visible.len()..]);
        self.has_text = true;
        self.after_markup = false;
    }
}

fn push_text(events: &mut Vec<AnswerEvent>, text: &str) {
    match events.last_mut() {
        _ if text.is_empty() => {}
        Some(AnswerEvent::Text(before)) => before.push_str(text),
        _ => events.push(AnswerEvent::Text(text.to_owned())),
    }
}

#[cfg(test)]
pub(crate) mod tests;
