package driver

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"
)

// stuckWriter blocks until release is closed.
type stuckWriter struct {
	entered, release chan struct{}
	bytes.Buffer
}

func (w *stuckWriter) Write(p []byte) (int, error) {
	select {
	case w.entered <- struct{}{}:
	default:
	}
	<-w.release
	return w.Buffer.Write(p)
}

func (w *stuckWriter) Close() error { return nil }

func TestLogFileDropsLinesWhileTheDiskHangs(t *testing.T) {
	w := &stuckWriter{entered: make(chan struct{}, 1), release: make(chan struct{})}
	f := newLogFile(w)
	line := []byte("a line\n")
	_, _ = f.Write(line)
	<-w.entered // the goroutine is in the disk with the first line
	for range logLines + 10 {
		if n, err := f.Write(line); n != len(line) || err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	close(w.release)
	f.Close()
	<-f.done
	if n := strings.Count(w.String(), "a line\n"); n != logLines+1 {
		t.Errorf("%d lines were written, not %d", n, logLines+1)
	}
	if !strings.Contains(w.String(), "log: 10 lines were dropped") {
		t.Error("the log does not tell how many lines were dropped")
	}
}

// TestLogFileRotatesWhileRunning writes beyond the size several times: the newest lines and a bounded number of older
// files stay.
func TestLogFileRotatesWhileRunning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.log")
	f := newLogFile(&lumberjack.Logger{Filename: path, MaxSize: 1, MaxBackups: 2})
	line := append(bytes.Repeat([]byte("x"), 1<<10-1), '\n')
	for range 6 {
		for range 1 << 10 {
			_, _ = f.Write(line)
		}
		deadline := time.Now().Add(time.Minute)
		for len(f.lines) > 0 && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
	}
	_, _ = io.WriteString(f, "the last line\n")
	f.Close()
	<-f.done
	b, err := os.ReadFile(path)
	if err != nil || !strings.HasSuffix(string(b), "the last line\n") {
		t.Errorf("the last line is missing: %v", err)
	}
	var all []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if all, _ = filepath.Glob(filepath.Join(filepath.Dir(path), "data*.log")); len(all) == 3 {
			return
		}
	}
	t.Errorf("files: %v", all)
}
