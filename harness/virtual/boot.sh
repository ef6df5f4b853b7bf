#!/bin/sh
# Replace this process by a node's sshd. It already runs in the node's network namespace and in host
# name and mount namespaces of its own, so these mounts are invisible outside.
# Usage: boot.sh NAME DIRECTORY HOME
set -eu
name=$1
dir=$2
home=$3

hostname "$name"

# The node's /etc is an overlay on the machine's, or a copy if the kernel refuses an overlay.
mkdir -p "$dir/work"
if ! mount -n -t overlay overlay -o "lowerdir=/etc,upperdir=$dir/etc,workdir=$dir/work" /etc 2>/dev/null; then
    mkdir -p "$dir/full"
    cp -a /etc/. "$dir/full"
    cp -a "$dir/etc/." "$dir/full"
    mount -n --bind "$dir/full" /etc
fi

# Hide the user's keys and known hosts, so that only /etc/ssh counts on the node.
if [ -d "$home/.ssh" ]; then
    mount -n --bind "$dir/dot_ssh" "$home/.ssh"
fi

# Hide the shell's startup files as well, so that logins are as fast as on a new host.
for file in .bashrc .bash_profile .bash_login .profile .zshenv .zshrc .zprofile .zlogin; do
    if [ -f "$home/$file" ]; then
        mount -n --bind /dev/null "$home/$file"
    fi
done

# Mount /sys again, as it shows the interfaces of the namespace that mounted it; keep its cgroups.
if [ -d /sys/fs/cgroup ]; then
    mount -n --rbind /sys/fs/cgroup "$dir/cgroup"
    mount -n -t sysfs sysfs /sys
    mount -n --rbind "$dir/cgroup" /sys/fs/cgroup
    umount -n -l "$dir/cgroup"
fi

exec "$(command -v sshd)" -D -e -f /etc/ssh/sshd_config
