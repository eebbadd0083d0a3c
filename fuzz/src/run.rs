//! Tasks of the programs beside fuzzing.

/// If `FUZZ_SEEDS` names a folder, writes the seeds there, one file each, and ends the process.
///
/// # Panics
/// If a file cannot be written.
#[cfg(fuzzing)]
pub fn write_seeds(seeds: fn() -> Vec<Vec<u8>>) {
    let Some(folder) = std::env::var_os("FUZZ_SEEDS") else {
        return;
    };
    for (number, seed) in seeds().iter().enumerate() {
        let path = std::path::Path::new(&folder).join(format!("seed-{number:03}"));
        std::fs::write(&path, seed).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    std::process::exit(0);
}

/// Runs the target once for each file on the command line.
#[cfg(not(fuzzing))]
pub fn replay(run: fn(&[u8])) -> std::process::ExitCode {
    use std::process::ExitCode;

    let mut code = ExitCode::SUCCESS;
    for path in std::env::args_os().skip(1) {
        let path = std::path::PathBuf::from(path);
        match std::fs::read(&path) {
            Ok(data) => {
                run(&data);
                println!("{}: nothing found", path.display());
            }
            Err(error) => {
                eprintln!("{}: {error}", path.display());
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}
