package wire

import (
	"net"
	"syscall"
	"testing"
)

// TestQuickSockets: both ends of a connection send again within a second, where the kernel has the option.
func TestQuickSockets(t *testing.T) {
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err := NewDialer().Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, c := range []net.Conn{a, b} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) {
			ms, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpRTOMax)
			if err != nil {
				t.Skipf("this kernel does not know the option: %v", err)
			}
			if ms != 1000 {
				t.Errorf("it sends again after up to %d ms", ms)
			}
			if ms, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout); err != nil || ms != 60000 {
				t.Errorf("the connection is given up after %d ms, %v", ms, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
}
