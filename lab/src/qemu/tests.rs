use super::*;

#[test]
fn the_last_processor_is_kept_free_from_three_on() {
    let line = |cpus| {
        LabConfig {
            cpus,
            ..LabConfig::default()
        }
        .command_line()
    };
    assert!(line(3).contains(" isolcpus=2 nohz_full=1-2 rcu_nocbs=1-2"));
    assert!(line(4).contains(" isolcpus=3 nohz_full=2-3 "));
    assert!(!line(2).contains("isolcpus"));
}

#[test]
fn kernel_options_are_appended_as_long_as_they_fit() {
    let with = |options: String| LabConfig {
        kernel_options: options,
        ..LabConfig::default()
    };
    let strict = with("iommu.strict=1".into());
    assert!(strict.command_line().ends_with(" iommu.strict=1"));
    strict.check().expect("it fits");
    let room = COMMAND_LINE_MAX - LabConfig::default().command_line().len() - 2;
    with("x".repeat(room)).check().expect("it fits exactly");
    for wrong in ["x".repeat(room + 1), "a\nb".into(), "a\0b".into()] {
        let text = with(wrong).check().expect_err("refused").to_string();
        assert!(text.contains("less than 2048 bytes"), "{text}");
    }
}

#[test]
fn there_may_always_be_a_second_processor() {
    assert_eq!(processors(1), "1,maxcpus=2");
    assert_eq!(processors(3), "3,maxcpus=3");
}

#[test]
fn absurd_sizes_and_missing_files_are_refused() {
    let config = LabConfig::default();
    assert!(config.check().is_ok());
    assert!(
        LabConfig {
            memory_mib: 64,
            ..config.clone()
        }
        .check()
        .is_err()
    );
    assert!(
        LabConfig {
            cpus: 0,
            ..config.clone()
        }
        .check()
        .is_err()
    );
    let error = config
        .with_exitless("/no/such/program")
        .check()
        .unwrap_err();
    assert_eq!(error.to_string(), "no such file: /no/such/program");
}

#[test]
fn files_that_do_not_fit_are_refused_with_the_memory_that_they_need() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("disk.img");
    let large = fs::File::create(&file).expect("a file");
    large.set_len(1200 << 20).expect("a sparse file");
    let mut config = LabConfig::default().with_file(&file, "/root/disk.img");
    let text = config.check().expect_err("too large").to_string();
    assert!(
        text.contains("needs 2816 MiB (--memory)") && text.contains("--disk"),
        "{text}"
    );
    config.memory_mib = 2816;
    config.check().expect("it fits");
    let disk = LabConfig {
        disks: vec![file],
        ..LabConfig::default()
    };
    disk.check().expect("it is not copied");
}

#[test]
fn disks_are_attached_with_their_format_and_any_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let (raw, image) = (dir.path().join("a,b"), dir.path().join("image"));
    fs::write(&raw, "raw").expect("a file");
    fs::write(&image, b"QFI\xfb\0\0\0\x03").expect("a file");
    let drive = |path| drive(path, "x").into_string().expect("text");
    assert!(drive(&raw).contains("format=raw,") && drive(&raw).ends_with("/a,,b"));
    assert!(drive(&image).contains("format=qcow2,"));
}
