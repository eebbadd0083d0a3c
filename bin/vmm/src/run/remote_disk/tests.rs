use super::*;

fn check(text: &str) -> anyhow::Result<RemoteDiskConfig> {
    let mut keys = Keys::parse("--disk", text).unwrap();
    let socket = keys.take("socket").unwrap();
    RemoteDiskConfig::check(socket, keys, 3)
}

#[test]
fn a_socket_alone_has_one_queue_and_a_name() {
    let disk = check("socket=/tmp/a.sock").unwrap();
    assert_eq!((disk.queues, disk.queue_size), (1, 256));
    assert_eq!(disk.id, "exitless3");
    let disk = check("socket=a,queues=4,queue-size=128,id=blue").unwrap();
    assert_eq!((disk.queues, disk.queue_size), (4, 128));
    assert_eq!(disk.id, "blue");
}

#[test]
fn key_of_the_server_is_refused_with_its_option() {
    let error = check("socket=a,readonly=on").unwrap_err().to_string();
    assert!(
        error.contains("exitless serve --block readonly="),
        "{error}"
    );
}

#[test]
fn nonsense_is_refused() {
    let long = format!("socket={}", "x".repeat(108));
    for text in [
        "socket=",
        "socket=a,queues=0",
        "socket=a,queues=17",
        "socket=a,queue-size=100",
        "socket=a,id=",
        "socket=a,colour=red",
        "socket=a,path=b",
        &long,
    ] {
        assert!(check(text).is_err(), "{text}");
    }
}
