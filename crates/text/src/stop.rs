/// Finds stop strings in text that arrives in pieces.
///
/// The result does not depend on where the text was split: reading character by character, the first stop string to
/// be completed ends the text, and of those completed at the same character the longest one. Text is held back only
/// while it could still be the beginning of a stop string.
///
/// Each stop string is followed by its own Knuth–Morris–Pratt automaton over bytes. UTF-8 synchronizes itself, so a
/// match and a held-back suffix always begin at a character boundary.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text received and not yet returned: what could still be the beginning of a stop string.
    held: String,
    finished: bool,
}

#[derive(Debug, Clone)]
struct Stop {
    text: String,
    /// `borders[n]`: length of the longest proper prefix of the first `n + 1` bytes that is also their suffix.
    borders: Vec<usize>,
    /// How many of its first bytes the text read so far ends with.
    matched: usize,
}

/// What [`StopMatcher::push`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopMatch {
    /// Text that is certainly not part of a stop string.
    pub text: String,
    /// The stop string that was found, if one was; the generation is over and `text` is all that came before it.
    pub stop: Option<String>,
}

impl StopMatcher {
    /// A matcher for these stop strings. Empty ones stop nothing.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        let stops =
            stops.into_iter().map(Into::into).filter(|text| !text.is_empty()).map(Stop::new).collect();
        Self { stops, held: String::new(), finished: false }
    }

    /// Reads the next piece of text and returns what can be shown. After a stop string was found, further text is
    /// ignored.
    pub fn push(&mut self, text: &str) -> StopMatch {
        if self.finished {
            return StopMatch::default();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            let mut longest: Option<&str> = None;
            for stop in &mut self.stops {
                if stop.step(byte) && longest.is_none_or(|other| other.len() < stop.text.len()) {
                    longest = Some(&stop.text);
                }
            }
            if let Some(stop) = longest {
                let stop = stop.to_owned();
                self.finished = true;
                self.held.truncate(before + index + 1 - stop.len());
                return StopMatch { text: std::mem::take(&mut self.held), stop: Some(stop) };
            }
        }
        let hold = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - hold);
        StopMatch { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// Ends the text: returns what was held back, since no stop string can be completed any more.
    pub fn finish(&mut self) -> String {
        self.finished = true;
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len()];
        let mut length = 0;
        for index in 1..bytes.len() {
            while length > 0 && bytes[length] != bytes[index] {
                length = borders[length - 1];
            }
            if bytes[length] == bytes[index] {
                length += 1;
            }
            borders[index] = length;
        }
        Self { text, borders, matched: 0 }
    }

    /// Reads one byte; true if the stop string is complete.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule itself, read off the whole text.
    fn expected(text: &str, stops: &[String]) -> (String, Option<String>) {
        for end in text.char_indices().map(|(at, character)| at + character.len_utf8()) {
            let done = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(*stop));
            if let Some(stop) = done.max_by_key(|stop| stop.len()) {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    fn run(pieces: &[&str], stops: &[String]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.to_vec());
        let mut text = String::new();
        for piece in pieces {
            let found = matcher.push(piece);
            text.push_str(&found.text);
            if found.stop.is_some() {
                assert_eq!(matcher.push("more"), StopMatch::default());
                assert_eq!(matcher.finish(), "");
                return (text, found.stop);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    #[test]
    fn every_two_way_split_gives_the_same_result() {
        let stops = ["</s>".to_owned(), "aab".to_owned(), "é日".to_owned()];
        for text in ["x</s>y", "aaab", "aaaaaa", "<<//s>", "né日本", "né", "</s", "ab</</s>", ""] {
            let whole = expected(text, &stops);
            for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                assert_eq!(run(&[&text[..at], &text[at..]], &stops), whole, "{text:?} split at {at}");
            }
        }
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut matcher = StopMatcher::new(["stop"]);
        assert_eq!(matcher.push("don't st").text, "don't ");
        assert_eq!(matcher.push("ay st").text, "stay ");
        assert_eq!(matcher.push("st").text, "st");
        assert_eq!(matcher.finish(), "st");
    }

    #[test]
    fn the_longest_of_the_stops_that_end_together_wins() {
        let mut matcher = StopMatcher::new(["c", "abc"]);
        assert_eq!(matcher.push("xab"), StopMatch { text: "x".into(), stop: None });
        assert_eq!(matcher.push("c"), StopMatch { text: String::new(), stop: Some("abc".into()) });
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_split(
            pieces in prop::collection::vec("[abé]{0,4}", 0..8),
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let text = pieces.concat();
            let whole = expected(&text, &stops);
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(&run(&pieces, &stops), &whole);
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
            prop_assert_eq!(&run(&characters, &stops), &whole);
        }
    }
}
