use std::collections::BTreeSet;

use serde_json::Value;

use crate::{Error, Tokenizer};

/// The tokens that end a generation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EosTokenIds {
    /// Every token that the checkpoint calls an end: the union of the config's, the generation config's and the
    /// tokenizer's.
    pub all: BTreeSet<u32>,
    /// The subset at which mlx-lm stops. There a truthy `eos_token_id` of generation_config.json *replaces* that of
    /// config.json (`mlx_lm.utils.load_config`), and the tokenizer's is added (`TokenizerWrapper`). It differs from
    /// [`all`](Self::all) only where config.json names a token that generation_config.json leaves out.
    pub mlx_lm: BTreeSet<u32>,
}

impl EosTokenIds {
    /// Collects the end tokens from the `eos_token_id` of config.json, that of generation_config.json, and the
    /// tokenizer's own.
    ///
    /// Either field may be absent, null, an integer or a list of integers; anything else is an error. Negative
    /// integers mean "none" in some checkpoints and are left out.
    pub fn new(
        config: Option<&Value>,
        generation_config: Option<&Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Error> {
        let from_config = token_ids("eos_token_id of config.json", config)?;
        let from_generation = token_ids("eos_token_id of generation_config.json", generation_config)?;
        let own = tokenizer.eos_token_id();
        // Python's truth value: 0 and the empty list do not replace the config's.
        let replaces = generation_config
            .is_some_and(|value| value.as_array().map_or(value.as_f64() != Some(0.0), |ids| !ids.is_empty()))
            && !generation_config.is_some_and(Value::is_null);
        let base = if replaces { &from_generation } else { &from_config };
        Ok(Self {
            mlx_lm: base.iter().copied().chain(own).collect(),
            all: from_config.iter().chain(&from_generation).copied().chain(own).collect(),
        })
    }
}

fn token_ids(field: &str, value: Option<&Value>) -> Result<Vec<u32>, Error> {
    let wrong = |found: &Value| Error::Field {
        field: field.to_owned(),
        expected: "a token id or a list of token ids",
        found: found.to_string().chars().take(80).collect(),
    };
    let values = match value {
        None | Some(Value::Null) => &[],
        Some(Value::Array(values)) => values.as_slice(),
        Some(value) => std::slice::from_ref(value),
    };
    let mut ids = Vec::with_capacity(values.len());
    for value in values {
        match value.as_i64() {
            Some(id) if id < 0 => {}
            Some(id) => ids.push(u32::try_from(id).map_err(|_| wrong(value))?),
            None => return Err(wrong(value)),
        }
    }
    Ok(ids)
}
