use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::*;

/// Returns a directory with these files.
fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("one")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    dir
}

fn kernel(version: &str) -> KernelBuild {
    KernelBuild {
        release: "6.1.0-56-cloud-amd64".into(),
        version: version.into(),
    }
}

#[test]
fn the_key_is_of_the_kernel_and_the_sources_alone() {
    let files = [
        ("Makefile", "obj-m := a.o\n"),
        ("a.c", "int a;"),
        ("sub/b.h", ""),
    ];
    let dir = directory(&files);
    let with = |variables: &[String], dir: &Path, version| {
        key(
            &kernel(version),
            variables,
            &source_files(dir).expect("read"),
        )
    };
    let key_of = |dir: &Path, version| with(&[], dir, version);
    let first = key_of(dir.path(), "6.1.192-2");
    assert_eq!(key_of(directory(&files).path(), "6.1.192-2"), first);
    assert_ne!(key_of(dir.path(), "6.1.192-1"), first, "another kernel");
    let variables = ["TEST=1".to_owned()];
    assert_ne!(with(&variables, dir.path(), "6.1.192-2"), first);
    // Products of a build beside the sources are no sources.
    for product in [
        "a.o",
        "a.ko",
        "a.mod",
        "a.mod.c",
        ".a.o.cmd",
        "Module.symvers",
        "modules.order",
    ] {
        fs::write(dir.path().join(product), "x").expect("a file");
    }
    assert_eq!(key_of(dir.path(), "6.1.192-2"), first);
    fs::write(dir.path().join("sub/b.h"), "#define B").expect("a file");
    let changed = key_of(dir.path(), "6.1.192-2");
    assert_ne!(changed, first, "another header");
    fs::rename(dir.path().join("sub/b.h"), dir.path().join("b.h")).expect("renamed");
    assert_ne!(key_of(dir.path(), "6.1.192-2"), changed, "another name");
}

#[test]
fn a_directory_without_a_module_is_refused_by_name() {
    let dir = directory(&[("a.c", "")]);
    for sources in [dir.path().to_path_buf(), dir.path().join("absent")] {
        let error = check(&sources.into()).expect_err("no module");
        assert!(matches!(&error, LabError::Config(text) if text.contains("Makefile")));
    }
    for name in ["Makefile", "Kbuild"] {
        let dir = directory(&[(name, "")]);
        let with = |variable: &str| {
            check(&ModuleSources {
                dir: dir.path().into(),
                variables: vec![variable.into()],
            })
        };
        assert!(with("TEST=1").is_ok() && with("EMPTY=").is_ok());
        for other in ["-j4", "clean", "=1", "A B=1", "--eval=x=1"] {
            assert!(with(other).is_err(), "{other}");
        }
    }
}

#[test]
fn one_module_is_expected() {
    assert_eq!(only_module(directory(&[("a.o", "")]).path()), Err(0));
    assert_eq!(
        only_module(directory(&[("a.ko", ""), ("b.ko", "")]).path()),
        Err(2)
    );
    let one = directory(&[("a.ko", ""), ("a.ko.debug", ""), ("last-used", "")]);
    assert_eq!(only_module(one.path()), Ok(one.path().join("a.ko")));
}

#[test]
fn the_compilers_messages_come_first_and_name_the_sources() {
    let out = |stderr: &str| Output {
        status: ExitStatus::from_raw(0x200),
        stdout: Vec::new(),
        stderr: stderr.into(),
    };
    let (scratch, sources) = (Path::new("/c/module-1.2-3"), Path::new("guest/m"));
    let said = out(
        "/c/module-1.2-3/a.c:1:5: error: expected ‘;’\n    1 | int a\n\n\
        make[3]: *** [scripts/Makefile.build:250: /c/module-1.2-3/a.o] Error 1\n\
        make: *** Error 2\n",
    );
    assert_eq!(
        messages(&said, scratch, sources),
        ["guest/m/a.c:1:5: error: expected ‘;’", "    1 | int a"]
    );
    let make = out("make[1]: *** No rule to make target '/c/module-1.2-3/b.o'.  Stop.\n");
    assert_eq!(
        messages(&make, scratch, sources),
        ["make[1]: *** No rule to make target 'guest/m/b.o'.  Stop."]
    );
    let many = out(&"error\n".repeat(1000));
    assert_eq!(messages(&many, scratch, sources).len(), LINES);
}

#[test]
fn an_error_names_the_module_the_kernel_and_what_to_install() {
    let missing = ["make".to_owned(), "gcc-12".to_owned()];
    let error = failed(
        Path::new("guest/m"),
        &kernel("6.1.192-2"),
        &lacking(&missing),
    );
    assert_eq!(
        error.to_string(),
        "cannot build module guest/m (Linux 6.1.0-56-cloud-amd64) for the lab: this machine has no \
         `make`, \
         `gcc-12`; `apt-get install make gcc-12` installs it"
    );
}
