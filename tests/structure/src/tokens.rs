//! A simple lexer and filter for Rust sources.

/// Returns the tokens of a source: words, `::`, other signs of one character, and strings. The
/// token of a string is a quotation mark and the text as written, so that it differs from every
/// word. Comments, lifetimes, characters and byte strings are left out.
pub(crate) fn lex(source: &str) -> Vec<String> {
    let mut rest = source;
    let mut tokens = Vec::new();
    while let Some(first) = rest.chars().next() {
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            comment(rest)
        } else if let Some(len) = literal(rest) {
            tokens.extend(string(&rest[..len]));
            len
        } else if first == '\'' {
            // A lifetime: its name is no token.
            1 + word(&rest[1..])
        } else if word(rest) > 0 {
            let len = word(rest);
            tokens.push(rest[..len].trim_start_matches("r#").to_owned());
            len
        } else if rest.starts_with("::") {
            tokens.push("::".into());
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(first.into());
            }
            first.len_utf8()
        };
        rest = &rest[len..];
    }
    tokens
}

/// Returns the length of the word at the start, or 0.
fn word(rest: &str) -> usize {
    let raw = if rest.starts_with("r#") { 2 } else { 0 };
    let is_of_word = |c: char| c.is_alphanumeric() || c == '_';
    let len = rest[raw..].find(|c| !is_of_word(c));
    match len.unwrap_or(rest.len() - raw) {
        0 => 0,
        len => raw + len,
    }
}

/// Returns the length of the block comment at the start; comments may be nested.
fn comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

/// Returns the length of the string or character literal at the start.
fn literal(rest: &str) -> Option<usize> {
    let body = rest.trim_start_matches(['b', 'c']);
    let prefix = rest.len() - body.len();
    if prefix > 1 {
        return None;
    }
    let hashes = body
        .strip_prefix('r')
        .map(|raw| raw.len() - raw.trim_start_matches('#').len());
    if let Some(hashes) = hashes
        && body[1 + hashes..].starts_with('"')
    {
        let end = format!("\"{}", "#".repeat(hashes));
        let from = prefix + 2 + hashes;
        return Some(
            rest[from..]
                .find(&end)
                .map_or(rest.len(), |at| from + at + end.len()),
        );
    }
    let quote = body.chars().next()?;
    let is_character = || {
        // 'a' or '\…', not the 'a of a lifetime.
        let mut chars = body.chars().skip(1);
        chars.next() == Some('\\') || chars.next() == Some('\'')
    };
    if quote != '"' && !(quote == '\'' && is_character()) {
        return None;
    }
    let mut is_escaped = false;
    for (at, c) in body.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return Some(prefix + at + 1),
            _ => {}
        }
    }
    Some(rest.len())
}

/// Returns the token of a literal if it is a string.
fn string(literal: &str) -> Option<String> {
    if !literal.starts_with(['"', 'r']) {
        return None;
    }
    let (_, text) = literal.split_once('"')?;
    let text = text.rsplit_once('"').map_or(text, |(text, _)| text);
    Some(format!("\"{text}"))
}

/// Returns the text of a string's token.
pub(crate) fn text_of(token: &str) -> Option<&str> {
    token.strip_prefix('"')
}

/// Returns the position after the bracket that matches the one at `open`.
pub(crate) fn after_group(tokens: &[String], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Returns the tokens without items that are compiled for tests only.
pub(crate) fn without_tests(tokens: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        match is_attribute(tokens, at) {
            true => {
                let end = after_group(tokens, at + 1);
                if is_of_tests(&tokens[at + 2..end]) {
                    at = after_item(tokens, end);
                    continue;
                }
                kept.extend_from_slice(&tokens[at..end]);
                at = end;
            }
            false => {
                kept.push(tokens[at].clone());
                at += 1;
            }
        }
    }
    kept
}

pub(crate) fn is_attribute(tokens: &[String], at: usize) -> bool {
    tokens[at] == "#" && tokens.get(at + 1).is_some_and(|next| next == "[")
}

/// Returns whether this attribute, up to its closing bracket, is a `cfg(…)` that implies `test`.
fn is_of_tests(attribute: &[String]) -> bool {
    match attribute {
        [cfg, open, condition @ .., close, _] if cfg == "cfg" && open == "(" && close == ")" => {
            holds_in_tests_only(condition)
        }
        _ => false,
    }
}

/// Returns whether a condition of a `cfg` implies `test`.
fn holds_in_tests_only(condition: &[String]) -> bool {
    match condition {
        [word] => word == "test",
        [all, open, arms @ .., _] if all == "all" && open == "(" => {
            split(arms).iter().any(|arm| holds_in_tests_only(arm))
        }
        [any, open, arms @ .., _] if any == "any" && open == "(" => {
            let arms = split(arms);
            !arms.is_empty() && arms.iter().all(|arm| holds_in_tests_only(arm))
        }
        _ => false,
    }
}

/// Returns the parts between commas that are not inside further brackets.
fn split(tokens: &[String]) -> Vec<&[String]> {
    let mut depth = 0;
    let parts = tokens.split(|token| {
        match token.as_str() {
            "(" => depth += 1,
            ")" => depth -= 1,
            _ => {}
        }
        depth == 0 && token == ","
    });
    parts.filter(|part| !part.is_empty()).collect()
}

/// Returns the position after the item, field or statement at `at`.
fn after_item(tokens: &[String], mut at: usize) -> usize {
    while at < tokens.len() && is_attribute(tokens, at) {
        at = after_group(tokens, at + 1);
    }
    let mut first = at;
    if tokens.get(first).is_some_and(|word| word == "pub") {
        first += 1;
        if tokens.get(first).is_some_and(|sign| sign == "(") {
            first = after_group(tokens, first);
        }
    }
    let keyword = tokens.get(first).map_or("", String::as_str);
    // Braces do not end these items.
    let ends_with_semicolon = matches!(keyword, "use" | "const" | "static" | "type" | "let");
    // Otherwise it is a field, a variant or an argument, which a comma ends.
    let is_item = ends_with_semicolon
        || matches!(
            keyword,
            "fn" | "impl"
                | "struct"
                | "enum"
                | "trait"
                | "mod"
                | "unsafe"
                | "async"
                | "macro_rules"
                | "union"
                | "extern"
        );
    while at < tokens.len() {
        match tokens[at].as_str() {
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            "}" | ")" | "]" => return at,
            "{" if !ends_with_semicolon => return after_group(tokens, at),
            "(" | "[" | "{" => at = after_group(tokens, at),
            _ => at += 1,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(source: &str) -> String {
        without_tests(&lex(source)).join(" ")
    }

    #[test]
    fn comments_and_characters_are_gone_and_a_string_is_one_token() {
        assert_eq!(text("a // crate::b\n/* x /* y */ crate::z */ c"), "a c");
        assert_eq!(
            text(r#"f("crate::b \" crate::c", 'x', '\'', b'"') d"#),
            "f ( \"crate::b \\\" crate::c , , , ) d"
        );
        assert_eq!(
            text("r##\"crate::a\"# crate::b\"## c br\"x\" e"),
            "\"crate::a\"# crate::b c e"
        );
        assert_eq!(
            text("fn f<'a>(x: &'a crate::A)"),
            "fn f < > ( x : & crate :: A )"
        );
    }

    #[test]
    fn raw_words_are_words() {
        assert_eq!(text("r#mod::x brake cx"), "mod :: x brake cx");
    }

    #[test]
    fn items_only_for_tests_are_left_out() {
        assert_eq!(text("#[cfg(test)] mod tests { use crate::a; } b"), "b");
        assert_eq!(
            text("#[cfg(all(test, loom))] #[rustfmt::skip] pub(crate) mod model; b"),
            "b"
        );
        assert_eq!(text("#[cfg(test)] use crate::{a, b}; c"), "c");
        assert_eq!(
            text("struct S { #[cfg(test)] pub a: crate::A, b: B }"),
            "struct S { b : B }"
        );
        assert_eq!(
            text("#[cfg(test)] impl<A, B> X<A, B> for Y { fn f() {} } c"),
            "c"
        );
        assert_eq!(text("#[cfg(test)] fn f<A, B>(a: A) -> B { a } c"), "c");
        assert_eq!(text("f(#[cfg(test)] crate::a) b"), "f ( ) b");
    }

    #[test]
    fn a_condition_is_of_tests_only_if_it_implies_them() {
        for (condition, is_dropped) in [
            ("test", true),
            ("all(loom, test)", true),
            ("all(test, not(feature = \"x\"))", true),
            ("any(test, all(test, loom),)", true),
            ("all(loom, any(test, all(shuttle, test)))", true),
            ("not(test)", false),
            ("any(test, feature = \"testing\")", false),
            ("all(loom, any(test, shuttle))", false),
            ("any()", false),
            ("feature = \"test\"", false),
        ] {
            let kept = text(&format!("#[cfg({condition})] mod m; b"));
            assert_eq!(kept == "b", is_dropped, "{condition}: {kept}");
        }
    }
}
