//! `russet embed` on a tiny embedding model.

mod common;

#[test]
fn texts_become_embeddings_of_length_one() {
    let Some(model) = common::embedding_model() else { return };
    let folder = model.arg();
    let run = |arguments: &[&str], stdin: &str| {
        common::russet_reading(stdin, &[&["embed", folder.as_str()], arguments].concat())
    };

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

    model.remove("modules.json");
    run(&["a text"], "").fails(1, &["no embedding model", "modules.json"]);
}
