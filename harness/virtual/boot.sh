#!/bin/sh
# Turn this process, already in its node's network namespace and its own host name and mount
# namespaces, into the node's sshd. Nothing that is mounted here is seen outside.
# Usage: boot.sh NAME DIRECTORY HOME
set -eu
name=$1
dir=$2
home=$3

hostname "$name"

# The node has its own /etc: a layer over the machine's, or a copy where layers are not possible.
mkdir -p "$dir/work"
if ! mount -n -t overlay overlay -o "lowerdir=/etc,upperdir=$dir/etc,workdir=$dir/work" /etc 2>/dev/null; then
    mkdir -p "$dir/full"
    cp -a /etc/. "$dir/full"
    cp -a "$dir/etc/." "$dir/full"
    mount -n --bind "$dir/full" /etc
fi

# A user's own keys and known hosts stay out: the node has what /etc/ssh says.
if [ -d "$home/.ssh" ]; then
    mount -n --bind "$dir/dot_ssh" "$home/.ssh"
fi

# So do the files that the user's shell reads first: a node is as quick to log into as a new host.
for file in .bashrc .bash_profile .bash_login .profile .zshenv .zshrc .zprofile .zlogin; do
    if [ -f "$home/$file" ]; then
        mount -n --bind /dev/null "$home/$file"
    fi
done

# /sys shows the network interfaces of the namespace it was mounted in; keep its cgroups.
if [ -d /sys/fs/cgroup ]; then
    mount -n --rbind /sys/fs/cgroup "$dir/cgroup"
    mount -n -t sysfs sysfs /sys
    mount -n --rbind "$dir/cgroup" /sys/fs/cgroup
    umount -n -l "$dir/cgroup"
fi

exec "$(command -v sshd)" -D -e -f /etc/ssh/sshd_config
