//! Frames between the lab's session on the real host and the agent inside the emulated one.
//!
//! One frame: payload length (`u32`), request number (`u32`), kind (`u8`), payload; little-endian.
//! A request number names one program or one file transfer; both ends work on many at a time. The
//! number 0 belongs to the connection itself. A frame that breaks the limits ends the connection:
//! both ends are built from this file, so it can only mean a torn stream.

use std::io::{self, Read, Write};

/// Longest payload of one frame, bytes. Longer data goes in several frames.
pub const MAX_PAYLOAD: usize = 1 << 18;

const HEADER: usize = 9;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The program or transfer it belongs to.
    pub id: u32,
    /// What it says.
    pub message: Message,
}

/// What a frame says. *H* is sent by the host session, *A* by the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// A: ready for requests.
    Hello,
    /// H: start a program; answered by `Stdout`, `Stderr`… and `Exit`, or by `Refused`.
    Spawn(Spawn),
    /// H: bytes for the program's standard input; empty ends it.
    Stdin(Vec<u8>),
    /// H: send this signal to the program's process group.
    Signal(i32),
    /// A: bytes from standard output.
    Stdout(Vec<u8>),
    /// A: bytes from standard error.
    Stderr(Vec<u8>),
    /// A: the program ended and all its output has been sent; 128 + n for signal n.
    Exit(u8),
    /// H: create this file with these permission bits; `Data` follow, an empty one ends the file.
    /// Answered by `Done` or `Refused`.
    Push {
        /// Path inside.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// H: send this file; answered by `Data`… and an empty `Data`, or `Refused`.
    Pull(String),
    /// Contents of a file.
    Data(Vec<u8>),
    /// A: a push is complete.
    Done,
    /// A: the request failed.
    Refused(String),
    /// H: power the emulated host off.
    Shutdown,
}

/// A program to start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spawn {
    /// Program and arguments; the first must not be empty.
    pub argv: Vec<String>,
    /// Additional environment, `NAME=value`.
    pub env: Vec<String>,
    /// Working directory; empty for the default.
    pub cwd: String,
    /// Connect it to the lab's terminal (`/dev/hvc0`) rather than to frames.
    pub tty: bool,
}

impl Frame {
    /// Makes a frame.
    #[must_use]
    pub fn new(id: u32, message: Message) -> Self {
        Self { id, message }
    }

    /// Writes the frame with one `write_all`.
    ///
    /// # Errors
    /// The writer's own; `InvalidInput` for a payload above [`MAX_PAYLOAD`].
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = vec![0; HEADER];
        let kind = self.message.encode(&mut bytes);
        let len = bytes.len() - HEADER;
        if len > MAX_PAYLOAD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("payload of {len}"),
            ));
        }
        let len = u32::try_from(len).expect("MAX_PAYLOAD fits in 32 bits");
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8] = kind;
        out.write_all(&bytes)
    }

    /// Reads one frame; `None` when the stream ends between frames.
    ///
    /// # Errors
    /// The reader's own; `InvalidData` for a frame that breaks the format; `UnexpectedEof` within one.
    pub fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER];
        loop {
            match input.read(&mut header[..1]) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        input.read_exact(&mut header[1..])?;
        let [l0, l1, l2, l3, i0, i1, i2, i3, kind] = header;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        if len > MAX_PAYLOAD {
            return Err(invalid(format!("frame of {len} bytes")));
        }
        let mut payload = vec![0; len];
        input.read_exact(&mut payload)?;
        Ok(Some(Self {
            id,
            message: Message::decode(kind, payload)?,
        }))
    }
}

impl Message {
    fn encode(&self, out: &mut Vec<u8>) -> u8 {
        match self {
            Self::Hello => 0,
            Self::Spawn(spawn) => {
                out.push(u8::from(spawn.tty));
                put_text(out, &spawn.cwd);
                put_list(out, &spawn.env);
                put_list(out, &spawn.argv);
                1
            }
            Self::Stdin(data) => put_bytes(out, data, 2),
            Self::Signal(signal) => put_bytes(out, &signal.to_le_bytes(), 3),
            Self::Stdout(data) => put_bytes(out, data, 4),
            Self::Stderr(data) => put_bytes(out, data, 5),
            Self::Exit(status) => put_bytes(out, &[*status], 6),
            Self::Push { path, mode } => {
                out.extend_from_slice(&mode.to_le_bytes());
                put_bytes(out, path.as_bytes(), 7)
            }
            Self::Pull(path) => put_bytes(out, path.as_bytes(), 8),
            Self::Data(data) => put_bytes(out, data, 9),
            Self::Done => 10,
            Self::Refused(reason) => put_bytes(out, reason.as_bytes(), 11),
            Self::Shutdown => 12,
        }
    }

    fn decode(kind: u8, payload: Vec<u8>) -> io::Result<Self> {
        let mut fields = Fields(&payload);
        Ok(match kind {
            0 => Self::Hello,
            1 => Self::Spawn(Spawn {
                tty: fields.byte()? != 0,
                cwd: fields.text()?,
                env: fields.list()?,
                argv: fields.list()?,
            }),
            2 => Self::Stdin(payload),
            3 => Self::Signal(i32::from_le_bytes(fields.word()?)),
            4 => Self::Stdout(payload),
            5 => Self::Stderr(payload),
            6 => Self::Exit(fields.byte()?),
            7 => {
                let mode = u32::from_le_bytes(fields.word()?);
                Self::Push {
                    mode,
                    path: utf8(fields.0.to_vec())?,
                }
            }
            8 => Self::Pull(utf8(payload)?),
            9 => Self::Data(payload),
            10 => Self::Done,
            11 => Self::Refused(utf8(payload)?),
            12 => Self::Shutdown,
            other => return Err(invalid(format!("frame of kind {other}"))),
        })
    }
}

fn put_bytes(out: &mut Vec<u8>, data: &[u8], kind: u8) -> u8 {
    out.extend_from_slice(data);
    kind
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_list(out: &mut Vec<u8>, list: &[String]) {
    let len = u32::try_from(list.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    for text in list {
        put_text(out, text);
    }
}

/// The unread rest of a payload.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take(&mut self, len: usize) -> io::Result<&[u8]> {
        let (head, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| invalid("field past the frame".into()))?;
        self.0 = rest;
        Ok(head)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn word(&mut self) -> io::Result<[u8; 4]> {
        let bytes = self.take(4)?;
        Ok([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn text(&mut self) -> io::Result<String> {
        let len = u32::from_le_bytes(self.word()?) as usize;
        utf8(self.take(len)?.to_vec())
    }

    fn list(&mut self) -> io::Result<Vec<String>> {
        // Each item takes at least 4 bytes of a payload of at most MAX_PAYLOAD, so a false count
        // runs into the end of the frame after at most 65,536 items.
        let count = u32::from_le_bytes(self.word()?);
        (0..count).map(|_| self.text()).collect()
    }
}

fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| invalid("text that is not UTF-8".into()))
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
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
}
