use super::*;

fn spawn() -> Spawn {
    Spawn {
        argv: vec![
            "/bin/sh".into(),
            "-c".into(),
            "echo \"a b\" 'ü'\n".into(),
            String::new(),
        ],
        env: vec!["A=1".into()],
        cwd: "/root".into(),
        tty: true,
    }
}

#[test]
fn every_message_survives_the_wire() {
    let messages = [
        Message::Hello,
        Message::Spawn(spawn()),
        Message::Stdin(vec![1, 2]),
        Message::Signal(9),
        Message::Stdout(vec![0; MAX_PAYLOAD]),
        Message::Stderr(vec![]),
        Message::Exit(137),
        Message::Push {
            path: "/root/x".into(),
            mode: 0o755,
        },
        Message::Pull("/y".into()),
        Message::Data(vec![7; 3]),
        Message::Done,
        Message::Refused("no".into()),
        Message::Shutdown,
    ];
    let mut wire = Vec::new();
    for (id, message) in (0..).zip(&messages) {
        Frame::new(id, message.clone()).write(&mut wire).unwrap();
    }
    let mut input = wire.as_slice();
    for (id, message) in (0..).zip(messages) {
        assert_eq!(
            Frame::read(&mut input).unwrap(),
            Some(Frame { id, message })
        );
    }
    assert_eq!(Frame::read(&mut input).unwrap(), None);
}

#[test]
fn a_torn_frame_is_an_error_at_every_length() {
    let mut wire = Vec::new();
    Frame::new(3, Message::Spawn(spawn()))
        .write(&mut wire)
        .unwrap();
    for len in 1..wire.len() {
        let error = Frame::read(&mut &wire[..len]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "at {len}");
    }
}

#[test]
fn lengths_that_lie_are_refused() {
    let huge = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 4];
    assert_eq!(
        Frame::read(&mut huge.as_slice()).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
    // A Spawn whose cwd claims 200 bytes in a 5-byte payload, and one of 2^32-1 variables.
    let cwd = [5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 200, 0, 0, 0];
    assert_eq!(
        Frame::read(&mut cwd.as_slice()).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
    let env = [
        9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
    ];
    assert_eq!(
        Frame::read(&mut env.as_slice()).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
    let kind = [0, 0, 0, 0, 0, 0, 0, 0, 99];
    assert_eq!(
        Frame::read(&mut kind.as_slice()).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
}

#[test]
fn an_oversized_payload_is_not_sent() {
    let mut wire = Vec::new();
    let frame = Frame::new(1, Message::Data(vec![0; MAX_PAYLOAD + 1]));
    assert!(frame.write(&mut wire).is_err());
    assert!(wire.is_empty());
}
