use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::{AddedToken, ModelWrapper};

use crate::detokenizer::Decoding;
use crate::special_tokens::SpecialTokens;
use crate::template::{MAX_DEPTH, check_depth};
use crate::{ChatTemplate, Error, StreamingDetokenizer, ThinkingMarkers, ToolParser};

/// The largest token id that is taken for real. Tables over the vocabulary are as long as its highest id, so an id far
/// beyond any vocabulary must not reserve gigabytes.
const MAX_TOKEN_ID: u32 = 1 << 24;

/// Files are read whole; the largest tokenizer.json in use are some 40 MB.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// A checkpoint's tokenizer: text to token ids, token ids to text, messages to prompts.
///
/// It does what Transformers' `AutoTokenizer` and mlx-lm's `TokenizerWrapper` do with the same directory, for
/// checkpoints that have a tokenizer.json. That file alone decides how text is split: `add_bos_token` and
/// `add_eos_token` of tokenizer_config.json have no effect beside it, just as in Transformers 5, and the tokenizer
/// classes of Transformers that rebuild their backend from code are not imitated.
///
/// Cloning is cheap; clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    backend: Arc<tokenizers::Tokenizer>,
    special: SpecialTokens,
    vocab_size: u32,
    decoding: Arc<Decoding>,
    thinking: Option<ThinkingMarkers>,
    tool_parser: Result<Option<ToolParser>, Error>,
    cleans_up_spaces: bool,
    /// Chat templates by name, compiled; a broken one is an error only when it is used.
    templates: BTreeMap<String, Result<ChatTemplate, Error>>,
}

/// What is read of tokenizer.json besides what the tokenizers crate reads.
#[derive(Deserialize)]
struct TokenizerFile {
    decoder: Option<Value>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a checkpoint directory: `tokenizer.json`, and where they exist `tokenizer_config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja` and `additional_chat_templates/*.jinja`.
    ///
    /// # Errors
    /// A file that is missing, unreadable or malformed is named in the error. A chat template that does not compile is
    /// no error here: it is reported when messages are rendered, and plain prompts still work.
    pub fn from_dir(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("tokenizer.json");
        let broken = |message: String| Error::File { path: path.clone(), message };
        let bytes = read(&path)?.ok_or_else(|| Error::Read {
            path: path.clone(),
            message: "the file does not exist; a checkpoint needs its tokenizer in this format".to_owned(),
        })?;
        let file: TokenizerFile =
            serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
        let mut backend =
            guarded(|| tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| error.to_string()))
                .map_err(broken)?;
        drop(bytes);
        let highest = |backend: &tokenizers::Tokenizer| backend.get_vocab(true).into_values().max();
        if let Some(id) = highest(&backend).filter(|id| *id > MAX_TOKEN_ID) {
            return Err(broken(format!("token id {id} is larger than any vocabulary")));
        }
        // Transformers never truncates or pads unless it is asked to, whatever the file says.
        backend.with_truncation(None).map_err(|error| broken(error.to_string()))?;
        backend.with_padding(None);

        let config_path = dir.join("tokenizer_config.json");
        let config = read_object(&config_path)?.unwrap_or_default();
        let map_path = dir.join("special_tokens_map.json");
        let map = read_object(&map_path)?;
        let special = SpecialTokens::new(
            (&config_path, &config),
            map.as_ref().map(|fields| (map_path.as_path(), fields)),
        )?;
        guarded(|| add_tokens(&mut backend, &special)).map_err(broken)?;
        let flag = |name| config.get(name).and_then(Value::as_bool).unwrap_or(false);
        backend.set_encode_special_tokens(flag("split_special_tokens"));

        // Transformers cleans up for BPE only when told to twice.
        let cleans_up_spaces = flag("clean_up_tokenization_spaces")
            && (!matches!(backend.get_model(), ModelWrapper::BPE(_))
                || flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"));
        let vocab_size = highest(&backend).map_or(0, |id| id.saturating_add(1));
        let backend = Arc::new(backend);
        let tokens = (0..vocab_size).map(|id| backend.id_to_token(id));
        let decoding = Decoding::new(file.decoder.as_ref(), tokens, &backend, || {
            // The probe of mlx-lm's NaiveStreamingDetokenizer.
            let decode = || {
                let probe = backend.encode_fast("a ,b", false).ok()?;
                backend.decode(probe.get_ids(), false).ok()
            };
            let text = guarded(|| decode().ok_or_else(String::new)).unwrap_or_default();
            let text = if cleans_up_spaces { clean_up_spaces(text) } else { text };
            !text.contains(" ,")
        });
        let templates = chat_templates(dir, &config_path, &config)?;
        let mut tokenizer = Inner {
            backend,
            special,
            vocab_size,
            decoding: Arc::new(decoding),
            thinking: None,
            tool_parser: Ok(None),
            cleans_up_spaces,
            templates,
        };
        tokenizer.thinking = ThinkingMarkers::find(
            |token| tokenizer.backend.token_to_id(token),
            |text| tokenizer.encode(text, false),
        )?;
        tokenizer.tool_parser = tokenizer.find_tool_parser(&config);
        Ok(Self(Arc::new(tokenizer)))
    }

    /// The token ids of a text. With `add_special_tokens`, the tokens that tokenizer.json puts around a text (for
    /// example the bos token) are added; special tokens written out in the text are recognized either way.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        self.0.encode(text, add_special_tokens)
    }

    /// The token ids of a plain prompt: with special tokens, unless the text already begins with the bos token's text
    /// (`mlx_lm.stream_generate`).
    ///
    /// A prompt rendered by [`apply_chat_template`](Self::apply_chat_template) is complete; use
    /// [`encode`](Self::encode) without special tokens for it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let complete = self.bos_token().is_some_and(|bos| text.starts_with(bos));
        self.encode(text, !complete)
    }

    /// The text of a finished sequence of tokens. Ids that have no token are left out.
    ///
    /// This is Transformers' `decode`. While tokens arrive use a [`detokenizer`](Self::detokenizer), whose text differs
    /// in details that mlx-lm's does too, such as the first space.
    pub fn decode(&self, tokens: &[u32], skip_special_tokens: bool) -> Result<String, Error> {
        let text =
            guarded(|| self.0.backend.decode(tokens, skip_special_tokens).map_err(|error| error.to_string()))
                .map_err(Error::Decode)?;
        Ok(if self.0.cleans_up_spaces { clean_up_spaces(text) } else { text })
    }

    /// A detokenizer for one generation. For most tokenizers it keeps a small part of the vocabulary's tables alive.
    pub fn detokenizer(&self) -> StreamingDetokenizer {
        StreamingDetokenizer::new(self.0.decoding.clone())
    }

    /// The id of a token given by its text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.backend.token_to_id(token)
    }

    /// The text in the vocabulary of the token with this id. It is not what the token prints: see
    /// [`decode`](Self::decode).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.backend.id_to_token(id)
    }

    /// The bytes that the token with this id adds to a text, which need not be whole characters; `None` if no token has
    /// this id.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.id_to_token(id)?;
        match self.0.decoding.token_bytes(id) {
            Some(bytes) => Some(bytes),
            None => self.decode(&[id], false).ok().map(String::into_bytes),
        }
    }

    /// Whether [`token_bytes`](Self::token_bytes) are what a token prints beside any other.
    pub(crate) fn has_fixed_token_bytes(&self) -> bool {
        !matches!(*self.0.decoding, Decoding::Naive { .. })
    }

    /// The tokens that tokenizer.json or its configuration calls special, and their texts.
    pub(crate) fn special_tokens(&self) -> BTreeMap<u32, String> {
        let added = self.0.backend.get_added_tokens_decoder();
        added.into_iter().filter(|(_, token)| token.special).map(|(id, token)| (id, token.content)).collect()
    }

    /// The highest token id plus one, added tokens included: the number of rows that an embedding needs so that every
    /// text can be encoded. A model may have more rows; with fewer, some tokens cannot be evaluated.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size as usize
    }

    /// The text of the token that begins a sequence.
    pub fn bos_token(&self) -> Option<&str> {
        self.0.special.get("bos_token")
    }

    /// The id of the token that begins a sequence.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.token_to_id(self.bos_token()?)
    }

    /// The text of the token that ends a sequence.
    pub fn eos_token(&self) -> Option<&str> {
        self.0.special.get("eos_token")
    }

    /// The id of the token that ends a sequence. The checkpoint may have further ones: see
    /// [`EosTokenIds`](crate::EosTokenIds).
    pub fn eos_token_id(&self) -> Option<u32> {
        self.token_to_id(self.eos_token()?)
    }

    /// The text of a special token by its name in the configuration, for example `pad_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.0.special.get(name)
    }

    /// Whether the model can reason before it answers.
    pub fn has_thinking(&self) -> bool {
        self.0.thinking.is_some()
    }

    /// The marks around the model's reasoning, found by the tokens of the vocabulary.
    pub fn thinking_markers(&self) -> Option<&ThinkingMarkers> {
        self.0.thinking.as_ref()
    }

    /// The markup in which the model calls tools: what tokenizer_config.json says, else what the chat template or the
    /// vocabulary show; none if they show nothing.
    ///
    /// # Errors
    /// When tokenizer_config.json names a parser that does not exist.
    pub fn tool_parser(&self) -> Result<Option<ToolParser>, Error> {
        self.0.tool_parser.clone()
    }

    /// Whether the chat template can tell a model about tools.
    pub fn takes_tools(&self) -> bool {
        self.chat_template(true).is_ok_and(|template| template.source().contains("tools"))
    }

    /// Whether the checkpoint comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        !self.0.templates.is_empty()
    }

    /// The chat template for a request: with tools the one called `tool_use` if there is one, else `default`.
    pub fn chat_template(&self, with_tools: bool) -> Result<&ChatTemplate, Error> {
        self.0.chat_template(with_tools)
    }

    /// Renders messages into a prompt, as `apply_chat_template` of Transformers and mlx-lm do.
    ///
    /// `messages` are objects with `role`, `content` and whatever else the template knows; null fields are dropped, and
    /// reasoning is passed under each of its usual names. `tools` are JSON schemas. `variables` are passed to the
    /// template; they override the special tokens but not `messages`, `tools` and `add_generation_prompt`.
    /// `enable_thinking` is always passed: as given in `variables`, else whether the model
    /// [can reason](Self::has_thinking).
    pub fn apply_chat_template(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, Error> {
        let template = self.chat_template(tools.is_some())?;
        if messages.is_empty() {
            return Err(Error::NoMessages);
        }
        let named = variables.iter().map(|(name, value)| (name.clone(), value));
        let tool =
            tools.unwrap_or_default().iter().enumerate().map(|(i, value)| (format!("tools[{i}]"), value));
        let message = messages.iter().enumerate().map(|(i, value)| (format!("messages[{i}]"), value));
        for (name, value) in named.chain(tool).chain(message) {
            check_depth(value, MAX_DEPTH - 1, || name.clone())?;
        }
        let mut all: Map<String, Value> = self
            .0
            .special
            .named
            .iter()
            .map(|(name, token)| (name.clone(), token.content.as_str().into()))
            .collect();
        all.insert("documents".to_owned(), Value::Null);
        all.insert("enable_thinking".to_owned(), self.has_thinking().into());
        all.extend(variables.clone());
        let messages = messages.iter().enumerate().map(|(index, message)| normalize(index, message));
        all.insert("messages".to_owned(), Value::Array(messages.collect::<Result<_, _>>()?));
        all.insert("tools".to_owned(), tools.map_or(Value::Null, |tools| Value::Array(tools.to_vec())));
        all.insert("add_generation_prompt".to_owned(), add_generation_prompt.into());
        template.render(&all)
    }
}

impl Inner {
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        let encode = || self.backend.encode_fast(text, add_special_tokens).map_err(|error| error.to_string());
        Ok(guarded(encode).map_err(Error::Encode)?.get_ids().to_vec())
    }

    fn chat_template(&self, with_tools: bool) -> Result<&ChatTemplate, Error> {
        let templates = &self.templates;
        let tool_use = if with_tools { templates.get("tool_use") } else { None };
        match tool_use.or_else(|| templates.get("default")) {
            Some(template) => template.as_ref().map_err(Clone::clone),
            None if templates.is_empty() => Err(Error::NoChatTemplate),
            None => Err(Error::NoDefaultChatTemplate { names: templates.keys().cloned().collect() }),
        }
    }

    /// As `mlx_lm.tokenizer_utils.load`. A `chat_template_type` is a template in Python, of which mlx-lm's muse_spark
    /// comes with a parser of its name.
    fn find_tool_parser(&self, config: &Map<String, Value>) -> Result<Option<ToolParser>, Error> {
        let named = |field| config.get(field).and_then(Value::as_str);
        if let Some(name) = named("tool_parser_type") {
            return name.parse().map(Some);
        }
        if let Some(parser) = named("chat_template_type").and_then(|name| name.parse().ok()) {
            return Ok(Some(parser));
        }
        let template = self.chat_template(true).ok().map(ChatTemplate::source);
        Ok(ToolParser::infer(template, |token| self.backend.token_to_id(token).is_some()))
    }
}

/// Adds the tokens that the configuration names and tokenizer.json lacks, and marks the special ones as special, as
/// `TokenizersBackend.__init__` and `_post_init` do.
fn add_tokens(backend: &mut tokenizers::Tokenizer, special: &SpecialTokens) -> Result<(), String> {
    let existing = backend.get_added_tokens_decoder();
    let mut missing: Vec<AddedToken> = special
        .added
        .iter()
        .map(|(_, token)| token)
        .filter(|token| !existing.values().any(|other| other == *token))
        .cloned()
        .collect();
    for token in special.named.iter().map(|(_, token)| token).chain(&special.extra) {
        let known = existing.values().chain(&missing).any(|other| other.content == token.content);
        if !known {
            missing.push(token.clone());
        }
    }
    backend.add_tokens(missing).map_err(|error| error.to_string())?;
    let all = special.named.iter().map(|(_, token)| token).chain(&special.extra).cloned();
    backend.add_special_tokens(all).map_err(|error| error.to_string())?;
    Ok(())
}

/// A message as templates get it: without null fields, and its reasoning under each of the names in use
/// (`_normalize_chat_messages` and `_alias_reasoning_fields` of Transformers).
fn normalize(index: usize, message: &Value) -> Result<Value, Error> {
    let Value::Object(fields) = message else {
        return Err(Error::Input {
            what: format!("messages[{index}]"),
            problem: "must be an object with a role and a content".to_owned(),
        });
    };
    let mut fields = fields.clone();
    fields.retain(|_, value| !value.is_null());
    let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| fields.get(*name));
    if let Some(reasoning) = reasoning.cloned() {
        let mut aliased = Map::new();
        aliased.insert("thinking".to_owned(), reasoning.clone());
        aliased.extend(fields);
        aliased.insert("reasoning_content".to_owned(), reasoning);
        fields = aliased;
    }
    Ok(Value::Object(fields))
}

/// The templates of a checkpoint. Files win over tokenizer_config.json.
fn chat_templates(
    dir: &Path,
    config_path: &Path,
    config: &Map<String, Value>,
) -> Result<BTreeMap<String, Result<ChatTemplate, Error>>, Error> {
    let mut sources = BTreeMap::new();
    if let Some(source) = read_text(&dir.join("chat_template.jinja"))? {
        sources.insert("default".to_owned(), source);
    }
    let more = dir.join("additional_chat_templates");
    match std::fs::read_dir(&more) {
        Ok(entries) => {
            for entry in entries {
                let path = entry.map_err(|error| unreadable(&more, &error))?.path();
                let name = path
                    .file_name()
                    .and_then(|name| name.to_str())
                    .and_then(|name| name.strip_suffix(".jinja"));
                if let Some(name) = name
                    && let Some(source) = read_text(&path)?
                {
                    sources.insert(name.to_owned(), source);
                }
            }
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
        Err(error) => return Err(unreadable(&more, &error)),
    }
    if sources.is_empty() {
        let wrong = || Error::File {
            path: config_path.to_owned(),
            message:
                "`chat_template` must be a string, or a list of objects with a string `name` and a string \
                      `template`"
                    .to_owned(),
        };
        match config.get("chat_template") {
            None | Some(Value::Null) => {}
            Some(Value::String(source)) => {
                sources.insert("default".to_owned(), source.clone());
            }
            Some(Value::Array(entries)) => {
                for entry in entries {
                    let field = |name| entry.get(name).and_then(Value::as_str).map(str::to_owned);
                    let (name, source) = field("name").zip(field("template")).ok_or_else(wrong)?;
                    sources.insert(name, source);
                }
            }
            Some(_) => return Err(wrong()),
        }
    }
    Ok(sources
        .into_iter()
        .map(|(name, source)| {
            let template = ChatTemplate::new(&name, &source);
            (name, template)
        })
        .collect())
}

/// `clean_up_tokenization` of Transformers.
fn clean_up_spaces(mut text: String) -> String {
    let rules = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    for (from, to) in rules {
        text = text.replace(from, to);
    }
    text
}

/// Runs code of the tokenizers crate, some of which panics on a malformed tokenizer.json instead of refusing it.
pub(crate) fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("unknown cause");
        Err(format!("the tokenizer is malformed ({message})"))
    })
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::Read { path: path.to_owned(), message: error.to_string() }
}

/// The bytes of a file, or none if there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > MAX_FILE_BYTES => Err(Error::File {
            path: path.to_owned(),
            message: format!("{} bytes are more than any tokenizer needs", metadata.len()),
        }),
        Ok(_) => std::fs::read(path).map(Some).map_err(|error| unreadable(path, &error)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(path, &error)),
    }
}

fn read_text(path: &Path) -> Result<Option<String>, Error> {
    read(path)?
        .map(|bytes| {
            String::from_utf8(bytes)
                .map_err(|error| Error::File { path: path.to_owned(), message: error.to_string() })
        })
        .transpose()
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    read(path)?
        .map(|bytes| {
            serde_json::from_slice(&bytes)
                .map_err(|error| Error::File { path: path.to_owned(), message: error.to_string() })
        })
        .transpose()
}
