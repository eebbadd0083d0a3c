//! Where the image lies: where a kernel does, at 1 MiB.

fn main() {
    let directory = env!("CARGO_MANIFEST_DIR");
    println!("cargo:rerun-if-changed={directory}/../bare/image.ld");
    for argument in [
        &format!("-T{directory}/../bare/image.ld"),
        "--defsym=BASE=0x100000",
        "-no-pie",
        "-static",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    for argument in ["-nostdlib", "--gc-sections", "--build-id=none", "-n"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
