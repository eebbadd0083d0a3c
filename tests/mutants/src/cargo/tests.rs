use std::os::unix::process::ExitStatusExt;

use super::*;

fn exit(code: i32) -> ExitStatus {
    ExitStatus::from_raw(code << 8)
}

const FAILED: &str = "
running 1 test
test a::b ... FAILED

failures:

---- a::b stdout ----
thread 'a::b' panicked at src/lib.rs:1:1:
lost

failures:
    a::b

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s
";
const PASSED: &str = "
running 1 test
test a::b ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s
";

fn is_broken(ending: &Ending) -> bool {
    matches!(ending, Ending::Broken(_))
}

#[test]
fn a_test_failed_where_libtest_lists_it() {
    let failed = Ending::Failed(FAILED.to_string());
    assert_eq!(ending("a::b", exit(101), FAILED), failed);
    assert_eq!(ending("a::b", exit(0), PASSED), Ending::Passed);
}

#[test]
fn another_end_is_neither_red_nor_green() {
    let begun = "\nrunning 1 test\nthread 'a::b' panicked at src/lib.rs:1:1:\nlost\n";
    let aborted = ExitStatus::from_raw(6);
    for (status, printed) in [
        // By a signal, before or after libtest said what it thinks.
        (aborted, begun),
        (aborted, FAILED),
        (aborted, PASSED),
        // `std::process::exit` in a test, or a program that is no test.
        (exit(101), begun),
        (exit(0), begun),
        (exit(101), ""),
        (exit(1), FAILED),
        (exit(101), PASSED),
        (exit(0), FAILED),
    ] {
        assert!(
            is_broken(&ending("a::b", status, printed)),
            "{status} {printed}"
        );
    }
    // Another test failed.
    assert!(is_broken(&ending("a::c", exit(101), FAILED)));
}

#[test]
fn a_test_that_does_not_run_is_none() {
    let none = "\nrunning 0 tests\n\n\
         test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out\n";
    assert_eq!(ending("a::b", exit(0), none), Ending::NoSuchTest);
    let ignored = "\nrunning 1 test\ntest a::b ... ignored\n\n\
         test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured\n";
    assert_eq!(ending("a::b", exit(0), ignored), Ending::NoSuchTest);
}

#[test]
fn the_test_binary_is_found_among_a_builds_messages() {
    let messages = concat!(
        r#"{"reason":"compiler-artifact","manifest_path":"/t/libs/a/Cargo.toml","profile":{"test":false},"executable":null}"#,
        "\n",
        r#"{"reason":"compiler-artifact","manifest_path":"/t/libs/a/Cargo.toml","profile":{"test":false},"executable":"/t/a"}"#,
        "\nwords\n",
        r#"{"reason":"compiler-artifact","manifest_path":"/t/libs/b/Cargo.toml","profile":{"test":true},"executable":"/t/b-1"}"#,
        "\n",
        r#"{"reason":"build-finished","success":true}"#,
    );
    let found = binary(messages).expect("a test binary");
    assert_eq!(found.executable, Path::new("/t/b-1"));
    assert_eq!(found.folder, Path::new("/t/libs/b"));
    assert!(binary("").is_none());
}
