package importer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/archive"
	"drover.io/drover/imagestore/format/qcow2"
	"drover.io/drover/imagestore/format/vhd"
	"drover.io/drover/imagestore/format/vhdx"
	"drover.io/drover/imagestore/format/vmdk"
)

// format is the format of an image, outside of any archive.
type format string

const (
	formatRaw   format = "raw"
	formatQCOW2 format = "qcow2"
	formatVMDK  format = "vmdk"
	formatVHD   format = "vhd"
	formatVHDX  format = "vhdx"
)

// headSize is the number of first bytes that detectFormat uses.
const headSize = 4096

// packedNames are the endings of archives.
var packedNames = map[archive.Format]string{archive.Gzip: ".gz", archive.Xz: ".xz", archive.Zstd: ".zst"}

// unsupportedFormats would otherwise count as raw and become a useless disk.
var unsupportedFormats = []struct {
	off                 int
	magic, name, advice string
}{
	{0, "BZh", "bzip2", "unpack it first, or pack it with gzip, xz or zstd"},
	{0, "PK\x03\x04", "zip", "unpack it first, or pack it with gzip, xz or zstd"},
	{0, "7z\xbc\xaf\x27\x1c", "7z", "unpack it first, or pack it with gzip, xz or zstd"},
	{0, "Rar!\x1a\x07", "RAR", "unpack it first, or pack it with gzip, xz or zstd"},
	{0, "\x04\x22\x4d\x18", "lz4", "unpack it first, or pack it with gzip, xz or zstd"},
	{257, "ustar", "tar", "unpack it first"},
	{0, "<<< ", "VDI", "convert it with: qemu-img convert -O qcow2"},
	{0, "QED\x00", "QED", "convert it with: qemu-img convert -O qcow2"},
	{0, "WithoutFreeSpace", "Parallels", "convert it with: qemu-img convert -O qcow2"},
	{0, "WithouFreSpacExt", "Parallels", "convert it with: qemu-img convert -O qcow2"},
	{0, "LUKS\xba\xbe", "LUKS", "decrypt the encrypted image first"},
}

// detectFormat finds the format by the first bytes: headSize bytes, or all bytes of a shorter image.
func detectFormat(head []byte) (format, error) {
	if len(head) == 0 {
		return "", api.Errorf(api.Invalid, "the image is empty: not a disk image")
	}
	switch {
	case qcow2.Detect(head):
		if v := binary.BigEndian.Uint32(head[4:]); v != 2 && v != 3 {
			return "", api.Errorf(api.Unsupported, "the image has qcow version %d, and only 2 and 3 can be read: "+
				"convert it with: qemu-img convert -O qcow2", v)
		}
		return formatQCOW2, nil
	case vmdk.Detect(head):
		return formatVMDK, nil
	case vhdx.Detect(head):
		return formatVHDX, nil
	case vhd.Detect(head):
		return formatVHD, nil
	}
	for _, f := range unsupportedFormats {
		if len(head) > f.off && bytes.HasPrefix(head[f.off:], []byte(f.magic)) {
			return "", api.Errorf(api.Unsupported, "the image is in %s format, which cannot be read: %s", f.name, f.advice)
		}
	}
	if isMarkup(head) {
		return "", api.Errorf(api.Invalid,
			"the image is a text page (HTML, XML or JSON), not a disk image: does the address need a log-in, or lead to a "+
				"web page?")
	}
	return formatRaw, nil
}

// isMarkup reports whether the bytes begin a web page or an error document. The whole head must be text: a disk image
// has zeros or machine code there.
func isMarkup(head []byte) bool {
	if bytes.IndexByte(head, 0) >= 0 {
		return false
	}
	text := strings.ToLower(string(bytes.TrimLeft(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf")), " \t\r\n")))
	for _, p := range []string{"<!doctype", "<html", "<head", "<?xml", "<error", `{"`, "{\n", "<!--"} {
		if strings.HasPrefix(text, p) {
			return true
		}
	}
	return false
}

// openImage opens an image that is not raw, in the first size bytes of r. stream: the image is still in transfer, and
// size is -1 if only the end shows the size.
func (f format) openImage(r io.ReaderAt, size int64, stream bool) (block.Source, error) {
	switch f {
	case formatQCOW2:
		return qcow2.Open(r, size, qcow2.Limits{Lazy: stream})
	case formatVMDK:
		return vmdk.Open(r, size, vmdk.Limits{Stream: stream})
	case formatVHD:
		return vhd.Open(r, size, vhd.Limits{Stream: stream})
	default:
		return vhdx.Open(r, size, vhdx.Limits{})
	}
}

// OpenDisk opens the disk inside a file, as the engine of Longhorn does: a file that does not begin as qcow2 is the
// disk itself. The disk owns the file; after an error the caller does.
func OpenDisk(file block.Source) (block.Source, error) {
	head := make([]byte, min(headSize, file.Size()))
	if _, err := io.ReadFull(io.NewSectionReader(file, 0, int64(len(head))), head); err != nil {
		return nil, err
	}
	if !qcow2.Detect(head) {
		return file, nil
	}
	img, err := qcow2.Open(file, file.Size(), qcow2.Limits{})
	if err != nil {
		return nil, err
	}
	return diskInFile{img, file}, nil
}

// diskInFile is a disk that closes its file.
type diskInFile struct {
	block.Source
	file io.Closer
}

// Close implements io.Closer.
func (d diskInFile) Close() error { return errors.Join(d.Source.Close(), d.file.Close()) }

// needsEnd reports that a conversion needs the size of the image.
func (f format) needsEnd() bool { return f != formatQCOW2 }

// tailSize is the number of last bytes that show a fixed VHD disk.
const tailSize = 512

// fixedVHD checks the last bytes of an image without a known head for the footer of a fixed VHD disk. It returns the
// size of the disk, or -1 without a footer.
func fixedVHD(tail []byte, size int64) (int64, error) {
	if !vhd.DetectEnd(tail) {
		return -1, nil
	}
	img, err := vhd.Open(tailReader{tail, size}, size, vhd.Limits{})
	if err != nil {
		return -1, err
	}
	defer func() { _ = img.Close() }()
	if !img.Info().Fixed {
		return -1, api.Errorf(api.Corrupt,
			"vhd: it ends like a dynamic disk and does not begin like one: its start is damaged")
	}
	return img.Size(), nil
}

// tailReader is a file with known last bytes; all other bytes are zeros.
type tailReader struct {
	tail []byte
	size int64
}

func (t tailReader) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if at := off - (t.size - int64(len(t.tail))); at >= 0 && at < int64(len(t.tail)) {
		copy(p, t.tail[at:])
	}
	return len(p), nil
}
