//! Plain form of the text behind a command's options.
//!
//! ```text
//! A paragraph is one line, however long.
//!
//! Examples:
//!   What the example does:
//!     a verbatim line, to be pasted into a shell
//!
//! Exit status:
//!   0  An entry: two blanks or more behind its tag.
//! ```

/// Headings, in the order of a manual page.
pub const HEADINGS: [&str; 6] = [
    "Exit status",
    "Signals",
    "Environment",
    "Files",
    "Examples",
    "Notes",
];

/// A part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// One of [`HEADINGS`]; empty for the text before the first.
    pub heading: &'static str,
    /// The blocks below it.
    pub blocks: Vec<Block>,
}

/// A part of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// To be filled.
    Paragraph(String),
    /// A term and its description.
    Entry(String, String),
    /// Lines to be kept as they are, without their common indentation.
    Verbatim(Vec<String>),
}

/// Returns whether a line is to be kept as it is.
pub fn is_verbatim(line: &str) -> bool {
    line.starts_with("    ") && !line.trim().is_empty()
}

/// Reads a text in the plain form.
pub fn sections(text: &str) -> Vec<Section> {
    let mut sections = vec![Section {
        heading: "",
        blocks: Vec::new(),
    }];
    let mut is_block_open = false;
    for line in text.lines() {
        let heading = line.strip_suffix(':');
        let heading = HEADINGS.into_iter().find(|name| heading == Some(*name));
        if let Some(heading) = heading {
            sections.push(Section {
                heading,
                blocks: Vec::new(),
            });
            is_block_open = false;
            continue;
        }
        let Some(Section { heading, blocks }) = sections.last_mut() else {
            continue;
        };
        let has_entries = !matches!(*heading, "" | "Examples" | "Notes");
        if line.trim().is_empty() {
            is_block_open = false;
        } else if is_verbatim(line) {
            match blocks.last_mut() {
                Some(Block::Verbatim(lines)) if is_block_open => lines.push(line.to_owned()),
                _ => blocks.push(Block::Verbatim(vec![line.to_owned()])),
            }
            is_block_open = true;
        } else {
            is_block_open = false;
            let line = line.trim();
            blocks.push(match line.split_once("  ").filter(|_| has_entries) {
                Some((tag, text)) => Block::Entry(tag.to_owned(), text.trim().to_owned()),
                None => Block::Paragraph(line.to_owned()),
            });
        }
    }
    for section in &mut sections {
        section.blocks.iter_mut().for_each(dedent);
    }
    sections.retain(|section| !section.blocks.is_empty());
    sections
}

fn dedent(block: &mut Block) {
    let Block::Verbatim(lines) = block else {
        return;
    };
    let indent = |line: &String| line.len() - line.trim_start().len();
    let least = lines.iter().map(indent).min().unwrap_or(0);
    for line in lines {
        line.drain(..least);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_paragraphs_entries_and_lines_that_are_kept() {
        let text = "Before.\n\nExamples:\n  One:\n    a \\\n      b\n\n    c  d\n  Two: e  f\n\
             Exit status:\n  0  good  and\n  1 bad\n";
        let verbatim =
            |lines: &[&str]| Block::Verbatim(lines.iter().map(|line| (*line).to_owned()).collect());
        let paragraph = |text: &str| Block::Paragraph(text.to_owned());
        assert_eq!(
            sections(text),
            [
                Section {
                    heading: "",
                    blocks: vec![paragraph("Before.")],
                },
                Section {
                    heading: "Examples",
                    blocks: vec![
                        paragraph("One:"),
                        verbatim(&["a \\", "  b"]),
                        verbatim(&["c  d"]),
                        paragraph("Two: e  f"),
                    ],
                },
                Section {
                    heading: "Exit status",
                    blocks: vec![
                        Block::Entry("0".into(), "good  and".into()),
                        paragraph("1 bad"),
                    ],
                },
            ]
        );
        assert!(sections("").is_empty());
    }
}
