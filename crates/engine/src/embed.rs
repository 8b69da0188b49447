use std::path::Path;

use russet_mlx::Dtype;
use russet_model::{EmbeddingRecipe, LoadOptions, Model};
use russet_text::Tokenizer;

use crate::{Error, Result};

/// Tokens of a text, at most; the end of a longer one is cut off.
const MAX_TOKENS: usize = 8192;

/// The token that texts end with, on whose hidden state the model was trained to be pooled.
const END_OF_TEXT: &str = "<|endoftext|>";

/// What the embedding of a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// To be searched for.
    Document,
    /// To search with.
    Query,
    /// To search with, for a task described in one sentence (Qwen3-Embedding's form).
    Instruction(&'a str),
}

/// How the texts of an embedding model become tokens, and hidden states embeddings.
#[derive(Clone, Debug)]
pub struct Embedding {
    tokenizer: Tokenizer,
    recipe: EmbeddingRecipe,
    /// Numbers of an embedding.
    dimensions: usize,
}

impl Embedding {
    /// That of a loaded model; `None` where it is no embedding model.
    ///
    /// # Errors
    /// As [`EmbeddingRecipe::open`].
    pub(crate) fn of(model: &Model, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let recipe = EmbeddingRecipe::open(model.checkpoint().dir())?;
        let dimensions = model.shape().hidden.max(0) as usize;
        Ok(recipe.map(|recipe| Self { tokenizer: tokenizer.clone(), recipe, dimensions }))
    }

    /// Numbers of an embedding.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// The tokens of a text with what its purpose puts before it.
    ///
    /// # Errors
    /// When the text cannot be encoded.
    pub fn tokens(&self, text: &str, purpose: Purpose<'_>) -> Result<Vec<u32>> {
        let text = match purpose {
            Purpose::Document => format!("{}{text}", self.recipe.document_prompt),
            Purpose::Query => format!("{}{text}", self.recipe.query_prompt),
            Purpose::Instruction(task) => format!("Instruct: {task}\nQuery:{text}"),
        };
        let mut tokens = self.tokenizer.encode(&text, true)?;
        if let Some(end) = self.tokenizer.token_to_id(END_OF_TEXT)
            && tokens.last() != Some(&end)
        {
            tokens.push(end);
        }
        if let [.., last] = tokens[..]
            && tokens.len() > MAX_TOKENS
        {
            tokens.truncate(MAX_TOKENS - 1);
            tokens.push(last);
        }
        Ok(tokens)
    }

    /// The embedding of a tokenized text by the model that this is of.
    pub(crate) fn embed(&self, model: &Model, tokens: &[u32], dimensions: Option<usize>) -> Result<Vec<f32>> {
        self.check(tokens, dimensions)?;
        model.check_tokens(tokens)?;
        let width = dimensions.unwrap_or(self.dimensions);
        let hidden = model.last_hidden(tokens)?;
        let mut embedding = hidden.astype(Dtype::F32)?.slice_axis(-1, 0, width as i32)?;
        if self.recipe.normalize || dimensions.is_some() {
            let norm = embedding.square()?.sum([-1], true)?.sqrt()?;
            embedding = embedding.divide(&norm.maximum(1e-12)?)?;
        }
        Ok(embedding.to_vec()?)
    }

    pub(crate) fn check(&self, tokens: &[u32], dimensions: Option<usize>) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::Prompt("there are no tokens to embed".into()));
        }
        match dimensions {
            Some(width) if width == 0 || width > self.dimensions => {
                let most = self.dimensions;
                let message = format!("{width}: the model's embeddings have 1 to {most}");
                Err(Error::Option { option: "dimensions", message })
            }
            _ => Ok(()),
        }
    }
}

/// An embedding model with last-token pooling, as mlx-optiq's `Embedder` runs it.
///
/// Every text is computed by itself, so that its embedding does not depend on the texts beside it.
pub struct Embedder {
    model: Model,
    embedding: Embedding,
}

impl Embedder {
    /// Loads the model in `dir`.
    ///
    /// # Errors
    /// When it is no embedding model, or cannot be loaded.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        if EmbeddingRecipe::open(dir)?.is_none() {
            return Err(no_embedding_model(dir));
        }
        let tokenizer = Tokenizer::from_dir(dir)?;
        let model = Model::load(dir, options)?;
        let embedding = Embedding::of(&model, &tokenizer)?.ok_or_else(|| no_embedding_model(dir))?;
        Ok(Self { model, embedding })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How texts become tokens.
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// The embedding of a tokenized text; its first `dimensions` numbers, scaled to length one, where asked for.
    ///
    /// # Errors
    /// For no tokens, tokens or dimensions that the model does not have, and when MLX fails.
    pub fn embed(&self, tokens: &[u32], dimensions: Option<usize>) -> Result<Vec<f32>> {
        self.embedding.embed(&self.model, tokens, dimensions)
    }
}

fn no_embedding_model(dir: &Path) -> Error {
    Error::Prompt(format!(
        "{} is no embedding model: it has no modules.json that says how hidden states are pooled",
        dir.display()
    ))
}
