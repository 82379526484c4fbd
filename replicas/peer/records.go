package peer

import (
	"bufio"
	"net"
	"sync"
	"sync/atomic"
)

// TLS writes each record of 16 KiB to the connection below alone, and reads as much. records gathers full records until
// a shorter one, or until flush, and reads ahead: a system call for each record costs as much as the record's
// encryption.
type records struct {
	net.Conn
	r *bufio.Reader // of the reader

	mu    sync.Mutex
	out   []byte
	holds atomic.Bool // out is not empty: for a caller that must not wait for a writer
}

const (
	fullRecord   = 16 << 10 // and some bytes more, encrypted
	recordBuffer = 128 << 10
)

func newRecords(nc net.Conn) *records {
	return &records{Conn: nc, r: bufio.NewReaderSize(nc, recordBuffer)}
}

func (c *records) Read(p []byte) (int, error) { return c.r.Read(p) }

func (c *records) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(p) < fullRecord && len(c.out) == 0 {
		return c.Conn.Write(p)
	}
	c.out = append(c.out, p...)
	c.holds.Store(true)
	if len(p) >= fullRecord && len(c.out)+len(p) <= recordBuffer {
		return len(p), nil
	}
	if err := c.sendRecords(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// sendRecords writes the gathered records. The caller has the lock.
func (c *records) sendRecords() error {
	if len(c.out) == 0 {
		return nil
	}
	_, err := c.Conn.Write(c.out)
	c.out = c.out[:0]
	c.holds.Store(false)
	return err
}

func (c *records) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sendRecords()
}

// frames gathers frames for a connection.
type frames struct {
	*bufio.Writer
	below *records // nil: no TLS
}

func newFrames(nc net.Conn, below *records) *frames {
	return &frames{bufio.NewWriterSize(nc, 64<<10), below}
}

// hasUnflushed reports whether gathered bytes wait for Flush.
func (f *frames) hasUnflushed() bool {
	return f.Buffered() > 0 || f.below != nil && f.below.holds.Load()
}

// Flush sends all gathered bytes.
func (f *frames) Flush() error {
	err := f.Writer.Flush()
	if err == nil && f.below != nil {
		err = f.below.flush()
	}
	return err
}

// hangUp closes a connection at once. TLS would send an alert first, and wait for a writer in progress.
func hangUp(nc net.Conn, below *records) {
	if below != nil {
		nc = below.Conn
	}
	_ = nc.Close()
}
