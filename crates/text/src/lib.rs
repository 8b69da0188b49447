//! Chat templates, tokenization and streaming detokenization.
