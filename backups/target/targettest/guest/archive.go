package guest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// writeArchive writes files, by names in the guest, as an archive for the kernel to unpack (cpio, format newc).
func writeArchive(to string, files map[string]string) (err error) {
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	a := archive{w: bufio.NewWriter(out)}
	folders := map[string]bool{}
	for name := range files {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			folders[dir] = true
		}
	}
	names := make([]string, 0, len(files)+len(folders))
	for name := range files {
		names = append(names, name)
	}
	for dir := range folders {
		names = append(names, dir)
	}
	slices.Sort(names) // a folder before its files
	for _, name := range names {
		if folders[name] {
			err = a.add(name, 0o040755, nil, 0)
		} else {
			err = a.addFile(name, files[name])
		}
		if err != nil {
			return err
		}
	}
	if err := a.add("TRAILER!!!", 0, nil, 0); err != nil {
		return err
	}
	return a.w.Flush()
}

type archive struct {
	w       *bufio.Writer
	entries int
}

func (a *archive) addFile(name, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	return a.add(name, 0o100755, f, st.Size())
}

// add adds an entry. The header, with the name, and the content are padded to four bytes.
func (a *archive) add(name string, mode uint32, content io.Reader, size int64) error {
	a.entries++
	name = strings.TrimPrefix(name, "/")
	const head = 110
	_, err := fmt.Fprintf(a.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s%s", a.entries, mode, 0, 0, 1,
		0, size, 0, 0, 0, 0, len(name)+1, 0, name, strings.Repeat("\x00", 1+padding(head+int64(len(name))+1)))
	if err != nil || content == nil {
		return err
	}
	if _, err := io.CopyN(a.w, content, size); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	_, err = a.w.WriteString(strings.Repeat("\x00", padding(size)))
	return err
}

func padding(n int64) int { return int(-n & 3) }
