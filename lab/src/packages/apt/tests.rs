use super::*;

#[test]
fn versions_are_told_by_suite() {
    let shown = " qemu | 1:10.0.2-2~bpo12+1 | http://mirror.example/debian bookworm-backports/main \
         amd64 Packages\n \
                     qemu | 1:7.2+dfsg-7 | http://mirror.example/debian bookworm/main amd64 \
                     Packages\n";
    assert_eq!(
        parse_madison(shown, None),
        ["1:10.0.2-2~bpo12+1", "1:7.2+dfsg-7"]
    );
    assert_eq!(parse_madison(shown, Some("bookworm")), ["1:7.2+dfsg-7"]);
    assert_eq!(parse_madison("", None), [""; 0]);
}

#[test]
fn the_meta_package_names_the_kernel() {
    let text = "Package: linux-image-cloud-amd64\n\
         Depends: linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1)\n";
    assert_eq!(
        parse_kernel_package(text).as_deref(),
        Some("linux-image-6.12.95+deb12-cloud-amd64")
    );
    assert_eq!(parse_kernel_package("Depends: libc6\n"), None);
}

#[test]
fn status_lines_are_progress_and_not_output() {
    let said = std::cell::RefCell::new(Vec::new());
    let notice = |line: &str| said.borrow_mut().push(line.to_owned());
    let mut progress = Progress::new("QEMU", &notice);
    let mut sh = Command::new("sh");
    sh.args(["-c", "echo dlstatus:1:20.5:Retrieving; echo out"]);
    assert_eq!(
        run_tool(&mut sh, "x", &mut progress).expect("sh runs"),
        "out\n"
    );
    assert!(said.borrow().is_empty(), "at once");
    progress.last -= PROGRESS;
    assert!(progress.hear("dlstatus:2:41.7:Retrieving file 2 of 18"));
    assert_eq!(*said.borrow(), ["QEMU: 41 %"]);
}

#[test]
fn a_failing_tool_is_quoted() {
    let mut sh = Command::new("sh");
    sh.args(["-c", "echo one >&2; echo two >&2; echo three >&2; exit 1"]);
    let error = run_tool(&mut sh, "it", &mut Progress::new("it", &|_| ()));
    let text = error.expect_err("it failed").to_string();
    assert!(
        text.contains("two; three") && !text.contains("one"),
        "{text}"
    );
}

#[test]
fn a_tool_is_quoted_where_it_says_what_went_wrong() {
    let words = "I: running apt-get update...\nE: Malformed entry 2 in sources file x (URI)\n\
         E: The list of sources could not \
                 be read.\nE: apt-get update failed\nI: removing tempdir...\n\
                 E: mmdebstrap failed to run\n";
    assert_eq!(
        last_words(words),
        "E: Malformed entry 2 in sources file x (URI); E: The list of sources could not be read."
    );
    assert_eq!(last_words("a\n\nb\nc\n"), "b; c");
    assert_eq!(last_words(""), "");
}

#[test]
fn a_set_is_named_by_its_first_package() {
    let shown = "Package: linux-headers-6.12.95+deb12-cloud-amd64\n\
        Depends: linux-base (>= 4.12~), linux-headers-6.12.95+deb12-common (= 6.12.95-1~bpo12+1), \
        linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1~bpo12+1) | \
        linux-image-6.12.95+deb12-cloud-amd64-unsigned, linux-kbuild-6.12.95+deb12, gcc-12\n";
    let expected = [
        "linux-headers-6.12.95+deb12-common",
        "linux-kbuild-6.12.95+deb12",
    ];
    assert_eq!(
        parse_headers_packages(shown),
        Some(expected.map(str::to_owned)),
        "backports"
    );
    let shown = "Depends: linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= \
         6.1.192-2), \
        linux-compiler-gcc-12-x86\n";
    let expected = ["linux-headers-6.1.0-56-common", "linux-kbuild-6.1"];
    assert_eq!(
        parse_headers_packages(shown),
        Some(expected.map(str::to_owned))
    );
    assert_eq!(
        parse_headers_packages("Depends: linux-headers-6.1.0-56-common\n"),
        None
    );
    assert_eq!(parse_headers_packages(""), None);
}

#[test]
fn a_makefile_of_headers_finds_its_other_half_wherever_it_lies() {
    let dir = tempfile::tempdir().expect("a directory");
    let build_dir = headers_build_dir(dir.path(), "6.1.0-56-cloud-amd64");
    let common = dir.path().join("usr/src/common");
    for dir in [&build_dir, &common] {
        fs::create_dir_all(dir).expect("a directory");
    }
    fs::write(common.join("Makefile"), "all:\n\t@echo found\n").expect("a file");
    let makefile = build_dir.join("Makefile");
    fs::write(&makefile, "include /usr/src/common/Makefile\n").expect("a file");
    make_headers_relocatable(dir.path(), "6.1.0-56-cloud-amd64").expect("it can be written");
    let mut make = Command::new("make");
    make.args(["-s", "-C"])
        .arg(&build_dir)
        .env_remove("MAKEFLAGS");
    let Ok(made) = make.output() else {
        eprintln!("skipped: no make");
        return;
    };
    assert_eq!(String::from_utf8_lossy(&made.stdout), "found\n");
}

#[test]
fn headers_are_of_the_kernels_version_and_no_other() {
    let build = KernelBuild {
        release: "6.1.0-56-cloud-amd64".into(),
        version: "6.1.192-2".into(),
    };
    let wanted = Wanted::Headers(&build);
    assert_eq!(wanted.package(), "linux-headers-6.1.0-56-cloud-amd64");
    assert!(wanted.will_do("6.1.192-2"));
    assert!(!wanted.will_do("6.1.192-1") && !wanted.will_do("6.1.192-2+b1"));
    assert!(wanted.hint().contains("boot/vmlinuz-6.1.0-56-cloud-amd64"));
}
