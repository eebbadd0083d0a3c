use super::*;

fn sh(script: &str) -> NativeProgram {
    let guard = ["-k", "1", "20"].map(str::to_owned);
    let args = ["-c".to_owned(), script.to_owned()];
    NativeProgram::start(&guard, Path::new("/bin/sh"), &args).expect("sh starts")
}

#[test]
fn output_is_waited_for_and_kept() {
    let mut program = sh("echo one; echo two; echo bad >&2; exit 3");
    program
        .wait_until(Duration::from_secs(10), |text| text.contains("one"))
        .expect("it is written");
    let output = program.wait().expect("it ends");
    assert_eq!(
        (output.status, output.stdout_text(), output.stderr_text()),
        (3, "one\ntwo\n".into(), "bad\n".into())
    );
}

#[test]
fn typed_input_and_its_end_reach_the_program() {
    let mut program = sh("read line; echo \"heard $line\"; read line || echo over");
    program.type_in("a word\n").expect("somebody listens");
    program
        .wait_until(Duration::from_secs(10), |text| {
            text.contains("heard a word")
        })
        .expect("it is written");
    let output = program.wait().expect("it ends");
    assert_eq!(output.stdout_text(), "heard a word\nover\n");
}

#[test]
fn a_paused_program_writes_nothing_until_it_is_resumed() {
    let dir = tempfile::tempdir().expect("a directory");
    let gate = dir.path().join("gate");
    let script = format!(
        "echo ready; until [ -e {} ]; do :; done; echo done",
        gate.display()
    );
    let mut program = sh(&script);
    let limit = Duration::from_secs(10);
    let has = |program: &mut NativeProgram, text: &str, limit| {
        program.wait_until(limit, |so_far| so_far.contains(text))
    };
    has(&mut program, "ready", limit).expect("it is written");
    program.signal(libc::SIGSTOP).expect("it is there");
    std::fs::write(&gate, "").expect("a file");
    let stopped = has(&mut program, "done", Duration::from_millis(300));
    let error = stopped.expect_err("it is stopped");
    assert!(matches!(
        error.downcast_ref(),
        Some(LabError::Timeout { .. })
    ));
    program.signal(libc::SIGCONT).expect("it is there");
    has(&mut program, "done", limit).expect("it goes on");
}

#[test]
fn a_program_that_ends_early_is_an_error() {
    let error = sh("exit 0").wait_until(Duration::from_secs(10), |_| false);
    assert!(error.is_err_and(|e| e.to_string().contains("ended before")));
}
