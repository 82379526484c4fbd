package stack

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// Formats of metadata files. A reader refuses every version but its own: what it does not understand it must not
// rewrite, and nothing is collected while such a file is on the disk.
const (
	formatDisk  = "drover-disk"
	formatStack = "drover-stack"
	formatLayer = "drover-layer"
	formatImage = "drover-image"
	version     = 1
	maxMeta     = 16 << 20
)

// envelope is what every metadata file holds: one JSON object, with a checksum over the body in its compact form.
type envelope struct {
	Format  string          `json:"format"`
	Version int             `json:"version"`
	SHA256  string          `json:"sha256"`
	Body    json.RawMessage `json:"body"`
}

func encodeMeta(format string, body any) ([]byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	out, err := json.MarshalIndent(envelope{format, version, hex.EncodeToString(sum[:]), raw}, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(out, '\n'), nil
}

func decodeMeta(data []byte, format string, body any) error {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return api.Errorf(api.Corrupt, "not a metadata file: %w", err)
	}
	if e.Format != format {
		return api.Errorf(api.Corrupt, "format is %q, not %q", e.Format, format)
	}
	if e.Version != version {
		return api.Errorf(api.Unsupported, "format %s version %d: this program reads version %d; use the one that wrote it",
			format, e.Version, version)
	}
	var raw bytes.Buffer
	if err := json.Compact(&raw, e.Body); err != nil {
		return api.Errorf(api.Corrupt, "body: %w", err)
	}
	sum := sha256.Sum256(raw.Bytes())
	if hex.EncodeToString(sum[:]) != e.SHA256 {
		return api.Errorf(api.Corrupt, "checksum of the body does not match")
	}
	d := json.NewDecoder(&raw)
	d.DisallowUnknownFields()
	if err := d.Decode(body); err != nil {
		return api.Errorf(api.Corrupt, "body: %w", err)
	}
	return nil
}

// readMeta reads a metadata file into body. A file that is not there is an error that wraps fs.ErrNotExist.
func readMeta(fsys file.FS, name, format string, body any) error {
	h, err := fsys.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	data, err := io.ReadAll(io.NewSectionReader(h, 0, maxMeta+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if len(data) > maxMeta {
		return api.Errorf(api.Corrupt, "%s is larger than %d bytes", name, maxMeta)
	}
	if err := decodeMeta(data, format, body); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// writeMeta replaces a metadata file atomically: the rename is the commit point, and it is durable on return.
func writeMeta(fsys file.FS, name, format string, body any) error {
	data, err := encodeMeta(format, body)
	if err != nil {
		return err
	}
	return replaceFile(fsys, name, data)
}

// errUnsure says that a file was replaced, and that it is not known whether the disk has the old one or the new one.
var errUnsure = errors.New("whether it is on the disk is not known")

func replaceFile(fsys file.FS, name string, data []byte) error {
	tmp := name + ".tmp"
	if err := writeFile(fsys, tmp, data); err != nil {
		return err
	}
	if err := fsys.Rename(tmp, name); err != nil {
		return err
	}
	if err := fsys.SyncDir(filepath.Dir(name)); err != nil {
		return fmt.Errorf("%w: %w", errUnsure, err)
	}
	return nil
}

// writeFile makes a file with durable content; its name is durable once the folder is synced.
func writeFile(fsys file.FS, name string, data []byte) error {
	h, err := fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err := h.WriteAt(data, 0); err != nil {
		return errors.Join(err, h.Close())
	}
	if err := h.Datasync(); err != nil {
		return errors.Join(err, h.Close())
	}
	return h.Close()
}
