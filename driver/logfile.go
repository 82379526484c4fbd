package driver

import (
	"bytes"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"
)

const (
	logSize    = 16 // MiB
	logBackups = 5
	logLines   = 4096
	// logGrace is how long Close waits for the disk.
	logGrace = time.Second
)

// logFile is the log of a process that carries I/O and outlives serve: so logFile rotates the file. Lines wait in
// memory for the goroutine that writes to disk. A slow, full or broken disk therefore never delays I/O: logFile drops
// the lines that do not fit, and reports the count.
//
// Close ends the goroutine, which belongs to logFile. The goroutine of lumberjack, which removes old files, stays until
// the process ends.
type logFile struct {
	lines   chan []byte
	dropped atomic.Int64
	quit    chan struct{}
	done    chan struct{}
}

func openLogFile(path string) *logFile {
	return newLogFile(&lumberjack.Logger{Filename: path, MaxSize: logSize, MaxBackups: logBackups})
}

func newLogFile(w io.WriteCloser) *logFile {
	f := &logFile{lines: make(chan []byte, logLines), quit: make(chan struct{}), done: make(chan struct{})}
	go f.writeLines(w)
	return f
}

// Write never blocks and never fails.
func (f *logFile) Write(p []byte) (int, error) {
	select {
	case f.lines <- bytes.Clone(p):
	default:
		f.dropped.Add(1)
	}
	return len(p), nil
}

func (f *logFile) writeLines(w io.WriteCloser) {
	defer close(f.done)
	defer func() { _ = w.Close() }()
	for {
		select {
		case b := <-f.lines:
			f.writeLine(w, b)
			continue
		default:
		}
		select {
		case b := <-f.lines:
			f.writeLine(w, b)
		case <-f.quit:
			return
		}
	}
}

// writeLine ignores errors, because no other place can report an error of the log.
func (f *logFile) writeLine(w io.Writer, b []byte) {
	_, _ = w.Write(b)
	if n := f.dropped.Swap(0); n > 0 {
		_, _ = fmt.Fprintf(w, "log: %d lines were dropped: the disk did not keep up\n", n)
	}
}

// Close writes the waiting lines, unless the disk stalls. The owner calls Close once.
func (f *logFile) Close() {
	close(f.quit)
	select {
	case <-f.done:
	case <-time.After(logGrace):
	}
}
