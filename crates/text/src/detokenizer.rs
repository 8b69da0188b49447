//! Streaming detokenization, after `mlx_lm.tokenizer_utils`.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::tokenizer::guarded;

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;
/// SentencePiece's stand-in for a space.
const SPACE_MARK: char = '\u{2581}';

/// How the text of a token sequence is put together, by the `decoder` of tokenizer.json.
#[derive(Debug)]
pub(crate) enum Decoding {
    /// SentencePiece with byte fallback.
    Spm {
        /// Drop the first space of the text.
        trim: bool,
        tokens: TokenBytes,
    },
    /// Byte-level BPE.
    Bpe {
        tokens: TokenBytes,
        /// The token that is a single space.
        space: Option<u32>,
    },
    /// Any other: decode the current line again with each token.
    Naive {
        backend: Arc<tokenizers::Tokenizer>,
        /// The tokenizer removes spaces before punctuation, so a final space has to wait for the next token.
        cleans_spaces: bool,
    },
}

impl Decoding {
    /// Chooses by exact comparison with the descriptions that `mlx_lm.tokenizer_utils.load` compares with. `tokens`
    /// lists the text of each id, in order.
    pub(crate) fn new(
        decoder: Option<&Value>,
        tokens: impl Iterator<Item = Option<String>>,
        backend: &Arc<tokenizers::Tokenizer>,
        cleans_spaces: impl FnOnce() -> bool,
    ) -> Self {
        let space = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
        let (bytes, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let spm = json!({"type": "Sequence", "decoders": [space, bytes, fuse]});
        let spm_trim = json!({"type": "Sequence", "decoders": [space, bytes, fuse, strip]});
        match decoder {
            Some(decoder) if *decoder == spm || *decoder == spm_trim => {
                Self::Spm { trim: *decoder == spm_trim, tokens: TokenBytes::new(tokens, spm_bytes) }
            }
            Some(decoder) if decoder.get("type").and_then(Value::as_str) == Some("ByteLevel") => {
                let mut space = None;
                let tokens = (0u32..).zip(tokens).map(|(id, token)| {
                    if token.as_deref() == Some("\u{120}") {
                        space = Some(id);
                    }
                    token
                });
                let tokens = TokenBytes::new(tokens, byte_level_bytes);
                Self::Bpe { tokens, space }
            }
            _ => Self::Naive { backend: backend.clone(), cleans_spaces: cleans_spaces() },
        }
    }

    /// The bytes of a token, where they do not depend on its neighbours.
    pub(crate) fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        match self {
            Self::Spm { tokens, .. } => {
                let bytes = tokens.get(id)?;
                // A byte token alone need not be UTF-8; any other may have marks of spaces.
                let text = std::str::from_utf8(bytes).map(|text| text.replace(SPACE_MARK, " "));
                Some(text.map_or_else(|_| bytes.to_vec(), String::into_bytes))
            }
            Self::Bpe { tokens, .. } => tokens.get(id).map(<[u8]>::to_vec),
            Self::Naive { .. } => None,
        }
    }
}

/// Decodes without Transformers' later cleaning up.
fn decode(backend: &tokenizers::Tokenizer, tokens: &[u32]) -> String {
    guarded(|| backend.decode(tokens, false).map_err(|error| error.to_string())).unwrap_or_default()
}

/// The bytes that each token id stands for.
#[derive(Debug, Default)]
pub(crate) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each token begins in `bytes`; one more entry for the end.
    starts: Vec<u32>,
    /// The ids that have no token, in order.
    missing: Vec<u32>,
}

impl TokenBytes {
    fn new(tokens: impl Iterator<Item = Option<String>>, to_bytes: fn(&str, &mut Vec<u8>)) -> Self {
        let mut table = Self { starts: vec![0], ..Self::default() };
        for (id, token) in (0u32..).zip(tokens) {
            match token {
                Some(token) => to_bytes(&token, &mut table.bytes),
                None => table.missing.push(id),
            }
            // Files with 4 GiB of text are refused before they come here.
            table.starts.push(u32::try_from(table.bytes.len()).unwrap_or(u32::MAX));
        }
        table.bytes.shrink_to_fit();
        table.starts.shrink_to_fit();
        table
    }

    /// The bytes of a token, or none if no token has this id.
    fn get(&self, id: u32) -> Option<&[u8]> {
        let index = usize::try_from(id).ok()?;
        let (start, end) = (*self.starts.get(index)?, *self.starts.get(index + 1)?);
        if self.missing.binary_search(&id).is_ok() {
            return None;
        }
        self.bytes.get(start as usize..end as usize)
    }
}

/// `<0xNN>` is that byte; anything else is text.
fn spm_bytes(token: &str, bytes: &mut Vec<u8>) {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.get(..2)).and_then(|hex| {
        // from_str_radix would take a sign.
        hex.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u8::from_str_radix(hex, 16).ok())?
    });
    match byte {
        Some(byte) => bytes.push(byte),
        None => bytes.extend_from_slice(token.as_bytes()),
    }
}

/// The byte that each character of GPT-2's alphabet stands for. Characters outside it keep their UTF-8 bytes, and so
/// does the stand-in of the zero byte (U+0100), because mlx-lm takes its value for a failed look-up.
fn byte_level_bytes(token: &str, bytes: &mut Vec<u8>) {
    for character in token.chars() {
        match byte_of(character) {
            Some(byte) if byte != 0 => bytes.push(byte),
            _ => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// GPT-2's alphabet: printable Latin-1 characters stand for themselves, and the other bytes, in order, for the
/// characters from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Turns the tokens of one generation into text, one at a time.
///
/// The concatenation of everything returned by [`push`](Self::push) and the final [`finish`](Self::finish) is the text
/// of the generation. Each piece is whole characters, and no later token changes an earlier piece: a character whose
/// bytes are not all there yet is held back. Bytes that never become a character show as U+FFFD.
///
/// Pieces are those of mlx-lm's `StreamingDetokenizer` classes, chosen in the same way by the `decoder` of tokenizer.json:
/// [`push`](Self::push) returns what `last_segment` would after the token, and [`finish`](Self::finish) what it would
/// after `finalize()`. So the first space of a byte-level BPE text is dropped, and those of a SentencePiece text whose
/// decoder strips them. There are these differences, where mlx-lm's stream fails, loses text, or changes text that it
/// has already given out:
///
/// - Ids that have no token: mlx-lm raises, except for ids past the vocabulary of byte-level BPE, which print `!`. Here
///   all such ids print `!` in byte-level BPE and nothing in the other kinds.
/// - SentencePiece: a token that begins with `<0x` but is no byte (mlx-lm raises) stands for its text.
/// - Byte-level BPE, at the end: characters outside the byte alphabet that were held back (mlx-lm raises) stand for
///   their UTF-8 bytes, and a zero byte prints as it does elsewhere.
/// - Other decoders (mlx-lm decodes the line anew with each token): mlx-lm finds the new text by its length, so where
///   the decoder rewrites earlier text (a run of byte tokens that stops being valid UTF-8) its stream repeats or skips
///   characters. Here the stream waits until the decoder extends again what was given out, or until the line ends.
/// - Other decoders: a line is closed by a text that ends in a newline as it is. mlx-lm also closes it when the newline
///   becomes last by removing U+FFFD or a space, and so loses what it removed.
/// - Other decoders: spaces that Transformers' `clean_up_tokenization_spaces` would remove later are kept.
#[derive(Debug, Clone)]
pub struct StreamingDetokenizer {
    decoding: Arc<Decoding>,
    /// No text has been returned yet, and the first space of the text is to be dropped.
    at_start: bool,
    /// The text continues a prompt: its first space is never dropped.
    continues: bool,
    /// SentencePiece and BPE: what is held back.
    held: Utf8Assembler,
    /// Naive: the tokens of the current line, and what has been returned of its text.
    line: Vec<u32>,
    shown: String,
}

impl StreamingDetokenizer {
    pub(crate) fn new(decoding: Arc<Decoding>) -> Self {
        Self {
            decoding,
            at_start: true,
            continues: false,
            held: Utf8Assembler::default(),
            line: Vec::new(),
            shown: String::new(),
        }
    }

    /// For text that continues a prompt as it stands, in which a first space separates two words: it is kept, where
    /// mlx-lm drops it.
    pub fn continuing(mut self) -> Self {
        self.continues = true;
        self.at_start = false;
        self
    }

    /// Adds a token and returns the text that became final with it, often empty.
    ///
    /// Special tokens are text like any other; a caller that does not want an end token shown does not push it. An id
    /// that has no token is no error (a model may have more rows than its tokenizer has tokens).
    pub fn push(&mut self, token: u32) -> String {
        let piece = match &*self.decoding {
            Decoding::Spm { trim, tokens } => {
                self.held.push(tokens.get(token).unwrap_or_default());
                if self.held.is_incomplete() {
                    return String::new();
                }
                spm_text(self.held.take(), *trim && self.at_start)
            }
            Decoding::Bpe { tokens, space } => {
                self.held.push(tokens.get(token).unwrap_or(b"!"));
                if self.held.is_incomplete() || *space == Some(token) {
                    return String::new();
                }
                bpe_text(self.held.take(), self.at_start)
            }
            Decoding::Naive { backend, cleans_spaces } => {
                self.line.push(token);
                let decoded = decode(backend, &self.line);
                if decoded.ends_with('\n') {
                    self.line.clear();
                    let shown = std::mem::take(&mut self.shown);
                    extension(&shown, &decoded)
                } else {
                    let stable = if decoded.ends_with(REPLACEMENT) {
                        decoded.trim_end_matches(REPLACEMENT)
                    } else if *cleans_spaces {
                        decoded.strip_suffix(' ').unwrap_or(&decoded)
                    } else {
                        &decoded
                    };
                    match stable.strip_prefix(self.shown.as_str()) {
                        Some(new) => {
                            let new = new.to_owned();
                            self.shown.push_str(&new);
                            new
                        }
                        None => String::new(),
                    }
                }
            }
        };
        self.at_start &= piece.is_empty();
        piece
    }

    /// Ends the text and returns what was held back. An incomplete character comes out as U+FFFD. The detokenizer is
    /// then as new.
    pub fn finish(&mut self) -> String {
        let piece = match &*self.decoding {
            Decoding::Spm { trim, .. } => spm_text(self.held.take(), *trim && self.at_start),
            Decoding::Bpe { .. } => bpe_text(self.held.take(), self.at_start),
            Decoding::Naive { backend, .. } => extension(&self.shown, &decode(backend, &self.line)),
        };
        self.at_start = !self.continues;
        self.line.clear();
        self.shown.clear();
        piece
    }
}

/// What `text` adds to what has been shown of it; if the decoder has rewritten the beginning, what lies behind as many
/// characters as were shown.
fn extension(shown: &str, text: &str) -> String {
    match text.strip_prefix(shown) {
        Some(new) => new.to_owned(),
        None => text.chars().skip(shown.chars().count()).collect(),
    }
}

fn spm_text(held: String, trim: bool) -> String {
    let text = held.replace(SPACE_MARK, " ");
    match text.strip_prefix(' ') {
        Some(rest) if trim => rest.to_owned(),
        _ => text,
    }
}

fn bpe_text(held: String, trim: bool) -> String {
    match held.strip_prefix(' ') {
        Some(rest) if trim => rest.to_owned(),
        _ => held,
    }
}

/// Collects bytes into text, with U+FFFD for each maximal invalid part as Python's `decode("utf-8", "replace")` and
/// `String::from_utf8_lossy` do, each byte being looked at once.
#[derive(Debug, Clone, Default)]
struct Utf8Assembler {
    text: String,
    /// The beginning of a character whose end has not come yet.
    tail: Vec<u8>,
}

impl Utf8Assembler {
    fn push(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let mut rest = self.tail.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(length) => {
                            self.text.push(REPLACEMENT);
                            rest = &after[length..];
                        }
                        None => {
                            rest = after;
                            break;
                        }
                    }
                }
            }
        }
        self.tail = rest.to_vec();
    }

    /// The decoded text would end in U+FFFD: a character is incomplete, or it cannot be told whether it is.
    fn is_incomplete(&self) -> bool {
        !self.tail.is_empty() || self.text.ends_with(REPLACEMENT)
    }

    /// Everything collected; an incomplete character becomes U+FFFD.
    fn take(&mut self) -> String {
        if !self.tail.is_empty() {
            self.tail.clear();
            self.text.push(REPLACEMENT);
        }
        std::mem::take(&mut self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection_of_256_characters() {
        let mut seen = [false; 256];
        for character in (0..0x400).filter_map(char::from_u32) {
            if let Some(byte) = byte_of(character) {
                assert!(!seen[usize::from(byte)], "byte {byte} has two characters");
                seen[usize::from(byte)] = true;
            }
        }
        assert!(seen.iter().all(|seen| *seen));
        assert_eq!(byte_of('\u{120}'), Some(b' '));
        assert_eq!(byte_of('\u{10a}'), Some(b'\n'));
        assert_eq!(byte_of('A'), Some(b'A'));
    }

    #[test]
    fn byte_tokens_are_recognized_as_mlx_lm_does() {
        let bytes = |token: &str| {
            let mut bytes = Vec::new();
            spm_bytes(token, &mut bytes);
            bytes
        };
        assert_eq!(bytes("<0x0A>"), b"\n");
        assert_eq!(bytes("<0xff>"), [0xff]);
        assert_eq!(bytes("<0xZZ>"), b"<0xZZ>");
        assert_eq!(bytes("<0x+A>"), b"<0x+A>");
        assert_eq!(bytes("<0x"), b"<0x");
        assert_eq!(bytes("<0x\u{e9}>"), "<0x\u{e9}>".as_bytes());
    }

    #[test]
    fn assembling_equals_lossy_decoding_for_every_split() {
        let samples: [&[u8]; 6] = [
            b"ab\xe2\x82\xacc",
            b"\xe2\x82",
            b"\xf0\x9f\x98\x80\xff\xfe",
            b"\xe2a\x80\x80",
            b"\xed\xa0\x80x",
            b"\xf0\x90\x80a\xc3",
        ];
        for sample in samples {
            for split in 0..=sample.len() {
                let mut assembler = Utf8Assembler::default();
                assembler.push(&sample[..split]);
                assembler.push(&sample[split..]);
                assert_eq!(assembler.take(), String::from_utf8_lossy(sample));
            }
        }
    }
}
