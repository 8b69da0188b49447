//! `russet embed` on a tiny embedding model.

mod common;

use std::fs;

use russet_testing::{FixtureSpec, Oracle};
use serde_json::json;

#[test]
fn texts_become_embeddings_of_length_one() {
    let Some(oracle) = Oracle::get() else { return };
    let fixture = oracle.fixture(&FixtureSpec::new("qwen3-embedding"));
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }

    let folder = dir.path().to_str().unwrap();
    let run = |arguments: &[&str], stdin: &str| {
        common::russet_reading(stdin, &[&["embed", folder], arguments].concat())
    };
    run(&["a text"], "").fails(1, &["no embedding model", "modules.json"]);

    let modules = json!([{"type": "x.Pooling", "path": "pooling"}, {"type": "x.Normalize", "path": ""}]);
    fs::write(dir.path().join("modules.json"), modules.to_string()).unwrap();
    fs::create_dir(dir.path().join("pooling")).unwrap();
    fs::write(dir.path().join("pooling/config.json"), r#"{"pooling_mode_lasttoken": true}"#).unwrap();

    let lines = run(&["first", "second"], "").text();
    assert_eq!(lines, run(&[], "first\nsecond\n").text());
    let embeddings: Vec<Vec<f64>> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(embeddings.len(), 2);
    assert_ne!(embeddings[0], embeddings[1]);
    for embedding in &embeddings {
        assert_eq!(embedding.len(), 64);
        let length: f64 = embedding.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }

    let json = run(&["--json", "--dimensions", "8", "--instruction", "Find", "first"], "").json();
    assert_eq!(json["embeddings"][0]["embedding"].as_array().unwrap().len(), 8);
    assert!(json["embeddings"][0]["tokens"].as_u64().unwrap() > 1);

    run(&[], "").fails(1, &["no text"]);
    run(&["--dimensions", "100000", "first"], "").fails(1, &["dimensions"]);
}
