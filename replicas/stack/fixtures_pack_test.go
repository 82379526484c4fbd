package stack

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/layer"
)

// A fixture keeps JSON and empty files unchanged. NAME.hex stands for a file of bytes: a line with the size, then a
// line for each run of bytes other than zero ("at" and the bytes) or for each block of eight repeated bytes ("at", the
// eight bytes, "block"). The rest is a hole. NAME.link has the name of the file to link to.

// dull reports whether a fixture leaves a file out, since the file holds no record.
func dull(rel string) bool {
	return rel == layer.LockFile || rel == reserveFile || filepath.Base(rel) == ownerFile || strings.HasPrefix(rel, trashDir) ||
		filepath.Ext(rel) == ".tmp"
}

// packDisk returns the content of a disk in the form of a fixture, by file name.
func packDisk(t *testing.T, root string) map[string][]byte {
	t.Helper()
	out, seen := map[string][]byte{}, map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, path)
		if err != nil || e.IsDir() || dull(rel) {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		ino := info.Sys().(*syscall.Stat_t).Ino
		switch first := seen[ino]; {
		case first != "":
			out[rel+".link"] = []byte(first + "\n")
		case info.Size() == 0 || strings.HasSuffix(rel, ".json"):
			seen[ino] = rel
			out[rel], err = os.ReadFile(path)
		default:
			seen[ino] = rel
			out[rel+".hex"], err = packFile(path, info.Size())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func packFile(path string, size int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out bytes.Buffer
	fmt.Fprintf(&out, "size %d\n", size)
	block := make([]byte, blockSize)
	for at := int64(0); ; {
		from, to, err := file.NextData(int(f.Fd()), at, size)
		if err != nil {
			return nil, err
		}
		if from >= size {
			return out.Bytes(), nil
		}
		for at = from; at < to; at += int64(len(block)) {
			block = block[:min(blockSize, to-at)]
			if _, err := f.ReadAt(block, at); err != nil {
				return nil, err
			}
			packBlock(&out, at, block)
		}
		block, at = block[:blockSize], to
	}
}

func packBlock(out *bytes.Buffer, at int64, b []byte) {
	if len(b) == int(blockSize) && bytes.Equal(b, bytes.Repeat(b[:8], len(b)/8)) {
		fmt.Fprintf(out, "%d %x block\n", at, b[:8])
		return
	}
	zeros := make([]byte, 8)
	for i := 0; i < len(b); {
		j := i
		for j < len(b) && j < i+48 && !bytes.Equal(b[j:min(j+8, len(b))], zeros[:min(8, len(b)-j)]) {
			j = min(j+8, len(b))
		}
		if j > i {
			fmt.Fprintf(out, "%d %x\n", at+int64(i), b[i:j])
		}
		i = max(j, i+8)
		if j > i {
			i = j
		}
	}
}

// unpackDisk makes a disk of a fixture.
func unpackDisk(t *testing.T, from, root string) {
	t.Helper()
	links := map[string]string{}
	err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(from, path)
		to := filepath.Join(root, rel)
		raw, err := os.ReadFile(path)
		if err = errors.Join(err, os.MkdirAll(filepath.Dir(to), 0o700)); err != nil {
			return err
		}
		switch filepath.Ext(rel) {
		case ".link":
			links[strings.TrimSuffix(to, ".link")] = filepath.Join(root, strings.TrimSpace(string(raw)))
			return nil
		case ".hex":
			return unpackFile(raw, strings.TrimSuffix(to, ".hex"))
		}
		return os.WriteFile(to, raw, 0o600)
	})
	for name, first := range links {
		err = errors.Join(err, os.Link(first, name))
	}
	for _, dir := range []string{layer.Dir, replicaDir, imagesDir, trashDir} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, dir), 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func unpackFile(raw []byte, to string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(bytes.NewReader(raw))
	for lines.Scan() {
		var at int64
		var text, repeated string
		if _, serr := fmt.Sscanf(lines.Text(), "size %d", &at); serr == nil {
			err = errors.Join(err, f.Truncate(at))
			continue
		}
		_, serr := fmt.Sscanf(lines.Text()+" once", "%d %s %s", &at, &text, &repeated)
		b, derr := hex.DecodeString(text)
		if repeated == "block" {
			v := binary.LittleEndian.Uint64(b)
			b = make([]byte, blockSize)
			fill(b, v)
		}
		_, werr := f.WriteAt(b, at)
		err = errors.Join(err, serr, derr, werr)
	}
	return errors.Join(err, lines.Err(), f.Sync(), f.Close()) // the sync lets the file system know the holes
}
