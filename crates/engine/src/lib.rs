//! Generation: from requests to tokens.
