use super::*;

const TWO_HUNKS: &str = "\
diff --git a/src/lib.rs b/src/lib.rs
index 123..456 100644
--- a/src/lib.rs
+++ b/src/lib.rs
@@ -2,2 +2,2 @@ fn one() {
-    a();
+    b();
 }
@@ -10,3 +10,2 @@
 fn two() {
-    lock();
     c();
";

const SOURCE: &str = "fn one() {\n    a();\n}\n\nfn two() {\n    lock();\n    c();\n}\n";

fn apply(diff: &str, text: &str) -> Result<String, Misfit> {
    let patch = Patch::parse(diff).expect("a diff");
    patch.files[0].apply(text)
}

#[test]
fn hunks_are_found_by_their_lines_wherever_they_stand() {
    let mutated = "fn one() {\n    b();\n}\n\nfn two() {\n    c();\n}\n";
    assert_eq!(apply(TWO_HUNKS, SOURCE).as_deref(), Ok(mutated));
    let moved = format!("// moved\n\n{SOURCE}// more\n");
    let made = apply(TWO_HUNKS, &moved);
    assert_eq!(made, Ok(format!("// moved\n\n{mutated}// more\n")));
}

#[test]
fn a_hunk_that_does_not_stand_at_one_place_is_refused() {
    let gone = SOURCE.replace("lock", "try_lock");
    let twice = format!("{SOURCE}{SOURCE}");
    // The second hunk's lines come first.
    let turned = "fn two() {\n    lock();\n    c();\n}\nfn one() {\n    a();\n}\n";
    for (text, hunk, places) in [(gone.as_str(), 2, 0), (&twice, 1, 2), (turned, 2, 1)] {
        let misfit = apply(TWO_HUNKS, text).expect_err("it does not fit");
        assert_eq!((misfit.hunk, misfit.places), (hunk, places), "{misfit}");
        assert!(misfit.to_string().contains("src/lib.rs"));
    }
    assert_eq!(apply(TWO_HUNKS, "").map_err(|m| m.places), Err(0));
}

#[test]
fn a_line_that_looks_like_a_head_is_a_line() {
    let diff = "--- a/x.md\n+++ b/x.md\n@@ -1,2 +1,2 @@\n--- a rule\n+@@ another\n same\n";
    let made = apply(diff, "-- a rule\nsame\n");
    assert_eq!(made.as_deref(), Ok("@@ another\nsame\n"));
}

#[test]
fn a_text_that_is_no_diff_is_refused() {
    const FILE: &str = "--- a/x\n+++ b/x\n";
    let cases = [
        (String::new(), "without a hunk"),
        (FILE.to_string(), "without a hunk"),
        ("@@ -1 +1 @@\n-a\n+b\n".to_string(), "without a file"),
        (format!("{FILE}@@ -1 @@\n-a\n"), "no hunk's head"),
        (format!("{FILE}@@ -1,2 +1 @@\n-a\n+b\n"), "fewer lines"),
        (format!("{FILE}@@ -1 +1,2 @@\n a\n-b\n+c\n"), "other lines"),
        (format!("{FILE}@@ -0,0 +1 @@\n+a\n"), "without context"),
        (format!("{FILE}@@ -1 +1 @@\n a\n"), "changes nothing"),
        (format!("{FILE}@@ -1 +1 @@\n*a\n"), "no line of a hunk"),
        (format!("{FILE}@@ -1 +1 @@\n-a\n+b\nwords\n"), "neither"),
        (
            format!("{FILE}@@ -1 +1 @@\n-a\n+b\n\\ No newline\n"),
            "neither",
        ),
        (
            "--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n".to_string(),
            "made or removed",
        ),
        (
            "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n".to_string(),
            "renamed",
        ),
        (
            "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n".to_string(),
            "leaves the tree",
        ),
        (
            "--- a//x\n+++ b//x\n@@ -1 +1 @@\n-a\n+b\n".to_string(),
            "leaves the tree",
        ),
    ];
    for (diff, what) in cases {
        let error = Patch::parse(&diff).expect_err(&diff).to_string();
        assert!(error.contains(what), "{diff}: {error}");
    }
}
