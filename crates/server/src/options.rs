//! What a request may say about how it is answered, whichever its endpoint.

use russet_engine::Sampling;
use serde_json::Value;

use crate::ServerOptions;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_type};
use crate::random::random;

/// Most answers to one prompt, as in OpenAI's API.
const MOST_CHOICES: i64 = 128;
/// Most likely tokens to a position, as in OpenAI's API.
pub(crate) const MOST_LOGPROBS: i64 = 20;
/// OpenAI allows four; it is memory that sets the limit here.
const MOST_STOPS: usize = 64;

/// Generation options of a request.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Answers to each prompt.
    pub(crate) n: usize,
    pub(crate) stream: bool,
    /// End a stream with a chunk of usage.
    pub(crate) include_usage: bool,
    pub(crate) max_tokens: usize,
    pub(crate) stop: Vec<String>,
    seed: Option<u64>,
    pub(crate) sampling: Sampling,
}

impl Options {
    pub(crate) fn read(fields: &Fields<'_>, server: &ServerOptions) -> Result<Self, ApiError> {
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.get("stream_options") {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::field("stream_options", "is allowed only when stream is true"));
            }
            Some(options) => {
                Fields::at(options, "stream_options")?.boolean("include_usage")?.unwrap_or(false)
            }
        };
        let count = |name| fields.integer(name, 1..=i64::MAX);
        let max_tokens = match count("max_completion_tokens")? {
            Some(count) => Some(count),
            None => count("max_tokens")?,
        };
        // Any integer is a seed.
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned);
        Ok(Self {
            n: fields.integer("n", 1..=MOST_CHOICES)?.map_or(1, |n| n as usize),
            stream,
            include_usage,
            max_tokens: max_tokens
                .map_or(server.max_tokens, |count| usize::try_from(count).unwrap_or(usize::MAX)),
            stop: stop(fields)?,
            seed: seed.or(server.seed),
            sampling: sampling(fields, &server.sampling)?,
        })
    }

    /// The seed of the answer with this index: of one seed, each has another; without one, any.
    pub(crate) fn seed(&self, index: usize) -> u64 {
        self.seed.map_or_else(random, |seed| seed.wrapping_add(index as u64))
    }
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let stops = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(texts)) => {
            let text = |(i, value): (usize, &Value)| match value {
                Value::String(text) => Ok(text.clone()),
                _ => Err(wrong_type(&format!("stop[{i}]"), "a string", value)),
            };
            texts.iter().enumerate().map(text).collect::<Result<_, _>>()?
        }
        Some(value) => return Err(wrong_type("stop", "a string or a list of strings", value)),
    };
    if stops.len() > MOST_STOPS {
        return Err(ApiError::field("stop", format!("at most {MOST_STOPS} strings are taken")));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::field("stop", "an empty string would end no answer"));
    }
    Ok(stops)
}

/// The server's sampling, changed by what the request says. Ranges are checked by the engine, save where the engine's
/// types are narrower than JSON's.
fn sampling(fields: &Fields<'_>, defaults: &Sampling) -> Result<Sampling, ApiError> {
    let integer = |name, default: i32| {
        Ok::<_, ApiError>(
            fields.integer(name, 0..=i64::from(i32::MAX))?.map_or(default, |number| number as i32),
        )
    };
    let number = |name, default: f64| Ok::<_, ApiError>(fields.number(name)?.unwrap_or(default));
    let penalty = |name, default: Option<f64>| Ok::<_, ApiError>(fields.number(name)?.or(default));
    Ok(Sampling {
        temperature: number("temperature", defaults.temperature)?,
        top_p: number("top_p", defaults.top_p)?,
        min_p: number("min_p", defaults.min_p)?,
        min_tokens_to_keep: integer("min_tokens_to_keep", defaults.min_tokens_to_keep)?,
        xtc_probability: number("xtc_probability", defaults.xtc_probability)?,
        xtc_threshold: number("xtc_threshold", defaults.xtc_threshold)?,
        xtc_special_tokens: defaults.xtc_special_tokens.clone(),
        top_k: integer("top_k", defaults.top_k)?,
        logit_bias: logit_bias(fields)?.unwrap_or_else(|| defaults.logit_bias.clone()),
        repetition_penalty: penalty("repetition_penalty", defaults.repetition_penalty)?,
        presence_penalty: penalty("presence_penalty", defaults.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", defaults.frequency_penalty)?,
        repetition_context_size: integer("repetition_context_size", defaults.repetition_context_size)?,
        presence_context_size: integer("presence_context_size", defaults.presence_context_size)?,
        frequency_context_size: integer("frequency_context_size", defaults.frequency_context_size)?,
    })
}

fn logit_bias(fields: &Fields<'_>) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(None) };
    let read = |(id, value): (&String, &Value)| {
        let path = || format!("logit_bias.{id}");
        let token = id.parse().map_err(|_| ApiError::field(path(), "is not a token id"))?;
        let bias = value.as_f64().ok_or_else(|| wrong_type(&path(), "a number", value))?;
        Ok((token, bias as f32))
    };
    biases.iter().map(read).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<Options, String> {
        Options::read(&Fields::new(body.as_object().unwrap()), &ServerOptions::new("model"))
            .map_err(|error| error.body()["error"]["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn what_is_null_has_its_default() {
        let names = [
            "n",
            "stream",
            "stream_options",
            "max_tokens",
            "max_completion_tokens",
            "stop",
            "seed",
            "temperature",
            "top_p",
            "min_p",
            "top_k",
            "min_tokens_to_keep",
            "xtc_probability",
            "xtc_threshold",
            "logit_bias",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "repetition_context_size",
            "presence_context_size",
            "frequency_context_size",
        ];
        let nulls = read(&names.map(|name| (name.to_owned(), Value::Null)).into_iter().collect()).unwrap();
        let defaults = ServerOptions::new("model");
        assert_eq!((nulls.n, nulls.stream, nulls.max_tokens), (1, false, defaults.max_tokens));
        assert_eq!(nulls.sampling, defaults.sampling);
        assert_ne!(nulls.seed(0), nulls.seed(0), "without a seed each answer has another");
        for name in names {
            let error = read(&json!({"stream": true, name: [[]]})).unwrap_err();
            assert!(
                error.starts_with(&format!("{name}: ")) || error.starts_with(&format!("{name}[0]")),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_given_is_taken() {
        let options = read(&json!({
            "n": 2, "max_tokens": 5, "max_completion_tokens": 7, "stop": "x", "seed": -1, "temperature": 0.5,
            "top_k": 3, "logit_bias": {"5": -100, "7": 1.5}, "frequency_penalty": 1, "unknown": {"a": 1},
        }))
        .unwrap();
        assert_eq!(
            (options.n, options.max_tokens, options.stop.as_slice()),
            (2, 7, ["x".to_owned()].as_slice())
        );
        assert_eq!((options.seed(0), options.seed(1)), (u64::MAX, 0));
        assert_eq!((options.sampling.temperature, options.sampling.top_k), (0.5, 3));
        assert_eq!(options.sampling.logit_bias, [(5, -100.0), (7, 1.5)]);
        assert_eq!(options.sampling.frequency_penalty, Some(1.0));
        for (body, problem) in [
            (json!({"logit_bias": {"x": 1}}), "logit_bias.x: is not a token id"),
            (json!({"logit_bias": {"1": "1"}}), "logit_bias.1: must be a number, but it is a string"),
            (json!({"stop": ["a", 1]}), "stop[1]: must be a string, but it is a number"),
            (json!({"stop": ""}), "stop: an empty string would end no answer"),
            (json!({"n": 0}), "n: must be from 1 to 128, but it is 0"),
            (json!({"max_tokens": 0}), "max_tokens: must be at least 1, but it is 0"),
            (json!({"stream_options": {}}), "stream_options: is allowed only when stream is true"),
            (
                json!({"stream": true, "stream_options": {"include_usage": 1}}),
                "stream_options.include_usage: must be true or false, but it is a number",
            ),
        ] {
            assert_eq!(read(&body).unwrap_err(), problem);
        }
    }
}
