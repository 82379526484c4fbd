package peer

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"strings"
	"syscall"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Version of the protocol. Each side names its versions in hello, and both speak the lower of the two newest, if both
// know that version.
//
// Since version 2 a write may have spans: the payload begins with the spans, and has only their bytes. Since version 3
// the arguments of a call, and an answer on request, may have regions as a set; before, as a list. Since version 4 a
// server answers a read with stack.ErrNotFetched if the replica still fetches its blocks from another source; the
// server keeps such a read of an older client until the replica has the blocks.
const (
	Version         = 4
	minVersion      = 1
	spansSince      = 2
	setsSince       = 3
	notFetchedSince = 4
	// Protocol is the name in the TLS handshake.
	Protocol = "drover-peer"
)

const (
	headerSize = 48
	maxPayload = 4 << 20
	maxControl = 4 << 20 // of the JSON in a control frame
)

// kind of a frame.
type kind uint8

const (
	kindHello kind = 1 + iota
	kindPing
	kindAnswer
	kindOpen
	kindAdopt
	kindRead
	kindWrite
	kindFlush
	kindDiscard
	kindZero
	kindClose
	kindCall // a control call by name
	kindEnd  // one past the last
)

const (
	flagFUA   = 1
	flagSpans = 2
)

// Spans of a write on the wire: their number, and for each span the first block in the write and the number of blocks,
// each a number of 4 bytes.
const (
	spansHead = 4
	spanSize  = 8
)

func encodeSpans(list []block.Span) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, spansHead+spanSize*len(list)), uint32(len(list)))
	for _, s := range list {
		b = binary.LittleEndian.AppendUint32(b, uint32(s.Off/block.Size))
		b = binary.LittleEndian.AppendUint32(b, uint32(s.Len/block.Size))
	}
	return b
}

// readSpans reads the payload of a write with spans: each span's bytes come to the span's place in buf.
func (h *header) readSpans(r io.Reader, buf []byte) ([]block.Span, error) {
	broken := api.Errorf(api.Corrupt, "a write with spans that make no sense")
	var head [spansHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := int64(binary.LittleEndian.Uint32(head[:]))
	if n == 0 || n > int64(len(buf))/block.Size || spansHead+n*spanSize >= int64(h.size) {
		return nil, broken
	}
	table := make([]byte, n*spanSize)
	if _, err := io.ReadFull(r, table); err != nil {
		return nil, err
	}
	sum := crc32.Update(crc32.Checksum(head[:], castagnoli), castagnoli, table)
	list, at, total := make([]block.Span, n), int64(0), spansHead+n*spanSize
	for i := range list {
		s := block.Span{Off: int64(binary.LittleEndian.Uint32(table[i*spanSize:])) * block.Size,
			Len: int64(binary.LittleEndian.Uint32(table[i*spanSize+4:])) * block.Size}
		if s.Off < at || s.Len == 0 || s.Off+s.Len > int64(len(buf)) {
			return nil, broken
		}
		list[i], at, total = s, s.Off+s.Len, total+s.Len
	}
	if total != int64(h.size) {
		return nil, broken
	}
	for _, s := range list {
		var err error
		if sum, err = readSum(r, buf[s.Off:][:s.Len], sum); err != nil {
			return nil, err
		}
	}
	if sum != h.sum {
		return nil, api.Errorf(api.Corrupt, "the payload of a write with spans is damaged")
	}
	return list, nil
}

// header of a frame. Numbers are little endian:
//
//	0 kind  1 flags  2 status  3 zero  4 session  8 id  16 off  24 n  32 size  36 sum  40 zero  44 CRC32C of 0..44
type header struct {
	kind    kind
	flags   uint8
	status  uint8 // of an answer: 0, or 1 with an error as payload
	session uint32
	id      uint64
	off, n  int64
	size    uint32 // of the payload
	sum     uint32 // CRC32C of the payload
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (h *header) encode(b *[headerSize]byte) {
	clear(b[:])
	b[0], b[1], b[2] = byte(h.kind), h.flags, h.status
	binary.LittleEndian.PutUint32(b[4:], h.session)
	binary.LittleEndian.PutUint64(b[8:], h.id)
	binary.LittleEndian.PutUint64(b[16:], uint64(h.off))
	binary.LittleEndian.PutUint64(b[24:], uint64(h.n))
	binary.LittleEndian.PutUint32(b[32:], h.size)
	binary.LittleEndian.PutUint32(b[36:], h.sum)
	binary.LittleEndian.PutUint32(b[44:], crc32.Checksum(b[:44], castagnoli))
}

func decodeHeader(b *[headerSize]byte) (h header, err error) {
	if crc32.Checksum(b[:44], castagnoli) != binary.LittleEndian.Uint32(b[44:]) {
		return h, api.Errorf(api.Corrupt, "the header of a frame is damaged")
	}
	h = header{kind: kind(b[0]), flags: b[1], status: b[2], session: binary.LittleEndian.Uint32(b[4:]),
		id: binary.LittleEndian.Uint64(b[8:]), off: int64(binary.LittleEndian.Uint64(b[16:])),
		n: int64(binary.LittleEndian.Uint64(b[24:])), size: binary.LittleEndian.Uint32(b[32:]),
		sum: binary.LittleEndian.Uint32(b[36:])}
	switch {
	case h.kind < kindHello || h.kind >= kindEnd || h.flags > flagFUA|flagSpans || h.status > 1 || b[3] != 0 ||
		binary.LittleEndian.Uint32(b[40:]) != 0:
		return h, api.Errorf(api.Corrupt, "a frame of kind %d makes no sense", b[0])
	case h.size > maxPayload:
		return h, api.Errorf(api.Corrupt, "the frame has %d bytes, more than %d", h.size, maxPayload)
	case h.off < 0 || h.n < 0 || h.off > api.MaxVolumeSize || h.n > api.MaxVolumeSize:
		return h, api.Errorf(api.Corrupt, "the frame asks for %d bytes at %d, beyond any volume", h.n, h.off)
	case h.flags&flagSpans != 0 && (h.kind != kindWrite || h.n > maxPayload || h.n%block.Size != 0),
		h.kind == kindWrite && h.flags&flagSpans == 0 && int64(h.size) != h.n,
		h.kind >= kindFlush && h.kind <= kindZero && h.size != 0, h.kind == kindRead && (h.size != 0 || h.n > maxPayload):
		return h, api.Errorf(api.Corrupt, "a frame of kind %d with %d bytes for %d", h.kind, h.size, h.n)
	}
	return h, nil
}

func readHeader(r io.Reader, b *[headerSize]byte) (header, error) {
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, err
	}
	return decodeHeader(b)
}

// readInto reads a payload and compares it with its header.
func (h *header) readInto(r io.Reader, buf []byte) error {
	sum, err := readSum(r, buf, 0)
	if err == nil && sum != h.sum {
		err = api.Errorf(api.Corrupt, "the payload of a frame of kind %d is damaged", h.kind)
	}
	return err
}

// readSum fills buf and adds the bytes to a CRC, piece by piece while the processor's cache has the piece.
func readSum(r io.Reader, buf []byte, sum uint32) (uint32, error) {
	for len(buf) > 0 {
		n, err := r.Read(buf)
		sum, buf = crc32.Update(sum, castagnoli, buf[:n]), buf[n:]
		if err != nil && len(buf) > 0 {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
	}
	return sum, nil
}

// readPayload reads a small payload, such as that of a control frame.
func readPayload(r io.Reader, h *header) ([]byte, error) {
	if h.size > maxControl {
		return nil, api.Errorf(api.Corrupt, "a control frame of %d bytes", h.size)
	}
	b := make([]byte, h.size)
	return b, h.readInto(r, b)
}

// hello is the first frame of each side.
type hello struct {
	Version    int    `json:"version"`
	MinVersion int    `json:"minVersion"`
	Node       string `json:"node"`
	Boot       string `json:"boot,omitempty"`   // of the server's machine
	Credit     int64  `json:"credit,omitempty"` // bytes of payload, both ways, that the client may have in progress
	Error      *fault `json:"error,omitempty"`
}

// validate checks the names in a hello: the engine keeps the boot in the device record, which has little room.
func (h *hello) validate() error {
	if len(h.Node) > maxName || len(h.Boot) > maxID {
		return api.Errorf(api.Corrupt, "a hello with a node of %d bytes and a boot of %d", len(h.Node), len(h.Boot))
	}
	return nil
}

// agreeVersion returns the version that both sides speak.
func (h *hello) agreeVersion() (int, error) {
	v := min(h.Version, Version)
	if v < minVersion || v < h.MinVersion {
		return 0, api.Errorf(api.Unsupported, "node %s speaks versions %d to %d of the replica protocol, this one %d to %d: "+
			"upgrade the older one", h.Node, h.MinVersion, h.Version, minVersion, Version)
	}
	return v, nil
}

// fault is an error on the wire.
type fault struct {
	Kind    string `json:"kind,omitempty"`
	Errno   int    `json:"errno,omitempty"`
	Message string `json:"message"`
	Code    string `json:"code,omitempty"` // names an error that callers compare with
}

// codes are the errors with an identity on the wire.
var codes = map[string]error{"restarted": ErrRestarted, "session": errSession, "failed": stack.ErrFailed,
	"given up": ErrAbandoned, "not fetched": stack.ErrNotFetched}

// errSession says that a server does not know the session any more. errSession is no answer to a request: the client
// begins a new session.
var errSession = api.Errorf(api.Unavailable, "the session has ended at the other side")

// ErrRestarted says that the replica's machine restarted during the session.
var ErrRestarted = stack.ErrRestarted

// ErrAbandoned says of a replica: an engine abandoned the replica, and the disk still has requests. No process can open
// the replica before the disk answers, and the replica has every acknowledged write. The error is of kind busy, so that
// a node of an older version waits.
var ErrAbandoned = api.Errorf(api.Busy, "an engine abandoned the replica, and the disk does not answer yet")

// maxErrno is one more than the kernel's largest error number.
const maxErrno = 4096

// maxMessage bounds the message of an error, in bytes.
const maxMessage = 4 << 10

// clipMessage cuts a message that is too long.
func clipMessage(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	return strings.ToValidUTF8(message[:maxMessage], "") + " ..."
}

func faultOf(err error) *fault {
	f := &fault{Message: clipMessage(err.Error()), Kind: api.KindOf(err).String()}
	var no syscall.Errno
	if errors.As(err, &no) {
		f.Errno = int(no)
	}
	for code, e := range codes {
		if errors.Is(err, e) {
			f.Code = code
		}
	}
	return f
}

func (f *fault) toError() error {
	k := api.Other
	for i := api.Other; i <= api.Denied; i++ {
		if i.String() == f.Kind {
			k = i
		}
	}
	switch e := codes[f.Code]; {
	case e != nil:
		return api.Errorf(k, "%w", e)
	case f.Errno > 0 && f.Errno < maxErrno:
		return api.Errorf(k, "%s: %w", clipMessage(f.Message), syscall.Errno(f.Errno))
	}
	return api.Errorf(k, "%s", clipMessage(f.Message))
}

// decodeFault reads the payload of an answer that is an error.
func decodeFault(b []byte) error {
	var f fault
	if err := json.Unmarshal(b, &f); err != nil {
		return api.Errorf(api.Corrupt, "an answer that makes no sense: %w", err)
	}
	return f.toError()
}
